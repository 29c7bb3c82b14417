"""Grammars in GBNF: what is read, what is accepted by llguidance then, and what is refused."""

from __future__ import annotations

import pytest

from treadle.testing.grammar_vocabulary import SmallTokenizer
from treadle_structured_output_kit.gbnf import is_gbnf, parse_gbnf
from treadle_structured_output_kit.gbnf_lark import gbnf_to_lark
from treadle_structured_output_kit.llguidance import LLGuidanceCompiler

TOKENIZER = SmallTokenizer()
COMPILER = LLGuidanceCompiler(TOKENIZER, TOKENIZER.vocab_size)
LIST = 'root ::= "[" (root ("," root)*)? "]"'


@pytest.mark.parametrize(
    ("grammar", "valid", "invalid"),
    [
        ('root ::= "a" | "b" "c"', ["a", "bc"], ["b", "ab"]),
        ('root ::= [a-c]+ "c" "\\n"', ["ac\n", "ccc\n"], ["c\n", "ac"]),  # no longest text
        ('root ::= rule "a" [a-z]*\nrule ::= "a" [a-z]* | "b"', ["aba", "ba", "aa"], ["b", "ab"]),
        (LIST, ["[]", "[[],[[]]]"], ["[", "[[]", "[,]"]),
        ('root ::= x {2, 3} "."{0 , 1}\nx ::= "x" # a comment\n', ["xx", "xxx."], ["x", "xxxx"]),
        ('root ::= "a"{2, -1} "b"{0}', ["aa", "aaaa"], ["a", "aab"]),
        ('root ::=\n  "a"\n  "b"\n  | "c"\nx-y.z ::= root', ["ab", "c"], ["a"]),
        (r'root ::= [\0-\x1f\-\]\\^"/] "\"\x41é\U0001F600\/"', ['\x00"Aé😀/', '-"Aé😀/', '^"Aé😀/'], ['a"Aé😀/']),
        ("root ::= [^a] . [^]", ["bab", "\n\n\n", "éé日"], ["abb", "bb"]),
        ('root ::= "a" (= [b-c]) [a-c]', ["ab"], ["a"]),
        ('root ::= Regex("[a-c/]+", flags="i") "1"', ["aB/1"], ["d1", "1"]),
        ('root ::= "<" Substring("ab", "c", "d") ">"', ["<abc>", "<cd>", "<>"], ["<abd>", "<b>"]),
        ('root ::= TagDispatch(("<a>", x), excludes=("no"))\nx ::= "1" x | "2"', ["", "hm <a>12 ok", "n"],
         ["<a>1", "no", "<a>2 no"]),
        ('root ::= TagDispatch(("<a>", x), loop_after_dispatch=false)\nx ::= "1"', ["hm", "hm<a>1"], ["<a>1 "]),
        ('root ::= y stop "!"\ny ::= TagDispatch(excludes=("end"))\nstop ::= "end" | "."', ["aend!", ".!"],
         ["a", "enda!", "endend!"]),
        ("root ::= TokenTagDispatch((0, x), excludes=(1))\nx ::= [a-c]", ["", "ab"], []),
        ("root ::= Token(256, 257)", [], ["a"]),
    ],
)  # fmt: skip
def test_what_is_accepted(grammar: str, valid: list[str], invalid: list[str]) -> None:
    assert is_gbnf(grammar)
    compiled = COMPILER.compile_grammar(grammar)
    for text in (*valid, *invalid):
        matcher = compiled.matcher()
        is_read = all(map(matcher.accept_token, TOKENIZER.encode(text)))
        assert (is_read and matcher.is_accepting) == (text in valid), text


def test_tokens_are_tokens() -> None:
    compiled = COMPILER.compile_grammar(
        'root ::= x Token(256) | "." ExcludeToken(257)\nx ::= "a" x | ""'
    )
    for tokens, is_valid in (
        ([*TOKENIZER.encode("aa"), 256], True),
        ([*TOKENIZER.encode("."), 256], True),
        ([*TOKENIZER.encode("."), 257], False),
        ([257], False),
    ):
        matcher = compiled.matcher()
        assert (all(map(matcher.accept_token, tokens)) and matcher.is_accepting) == is_valid


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('start ::= "a"', "has no rule root"),
        ("root ::= a", "refers to a, which is no rule"),
        ('root ::= "a" )', "a rule, name ::= …, is expected in line 1"),
        ('root ::= ("a"', r"a \) is expected"),
        ('root ::= "a\nb"', "the text has no end"),
        ("root ::= [a", "have no end"),
        ("root ::= [b-a]", "'b' to 'a' is empty"),
        ("root ::= []", "matches no character"),
        (r'root ::= "\q"', r"\\q is no escape"),
        (r'root ::= "\u00"', "needs the digits"),
        (r"root ::= [\UFFFFFFFF]", "needs the digits"),
        (r"root ::= [\uD800]", "halves of others"),
        ('root ::= "a"{3,2}', "no number of repeats"),
        ('root ::= "a"\nroot ::= "b"', "the rule root is there already in line 2"),
        ('root[lazy] ::= "a"', r"attributes of rules, \[lazy\], are not supported"),
        ('root ::= Regex("a", json_string=true)', "Regex with these arguments"),
        ('root ::= Regex("a", flags="q")', "the flags q"),
        ('root ::= Regex("a"', "a , or"),
        ("root ::= Substring()", "Substring with these arguments"),
        ('root ::= TagDispatch(("a", b))', "refers to b, which is no rule"),
        ('root ::= TagDispatch("a")', "takes pairs of a str and a rule"),
        ('root ::= TagDispatch(excludes=(1))', "something else than values of str"),
        ('root ::= x root\nx ::= TagDispatch()', "followed by something else than texts"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "nested more than 64 deep"),
        ("root ::= " + '"a"' + "*" * 100, "repeats of repeats"),
        ("root ::= Token(" + "(" * 100, "nested more than 64 deep"),
        ('root ::= "a" ~', "is expected in line 1"),
        ("just words", "a rule, name ::= …, is expected"),
    ],
)  # fmt: skip
def test_what_is_refused(grammar: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gbnf_to_lark(grammar)


def test_lark_is_not_gbnf() -> None:
    assert not is_gbnf('start: "::=" | x\nx: /a ::= b/')
    assert set(parse_gbnf(LIST)) == {"root"}
