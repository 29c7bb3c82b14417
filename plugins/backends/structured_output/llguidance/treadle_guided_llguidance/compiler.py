"""llguidance behind the contract of treadle: one tokenizer for all grammars, one parser a sequence."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from treadle.api.schemas import subschemas
from treadle.api.types import GrammarSpec, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("Compiler",)

# What the library does not implement and says so; named here too, so that another backend gets
# its chance before anything is compiled.
REFUSED = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
KINDS = ("json_schema", "json_object", "regex", "choice", "ebnf")
SPECIAL_CHARACTERS = frozenset(r"\.+*?()|[]{}^$#&-~/")


class Compiler:
    """Immutable, safe in threads."""

    name = "llguidance"

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, *, strict: bool, whitespace_pattern: str
    ) -> None:
        self._strict = strict
        self._whitespace = whitespace_pattern
        self._vocab_size = vocab_size
        # The end gets an id of its own behind the vocabulary: the ids that really end a sequence
        # are the core's affair, and any of the model's may be an ordinary token of a grammar.
        wrapper = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size))
        self._tokenizer = LLTokenizer(wrapper, n_vocab=vocab_size + 1, eos_token=vocab_size)

    def refuses(self, spec: GrammarSpec) -> str | None:
        if spec.kind not in KINDS:
            return f"grammars of the kind {spec.kind} are not supported"
        if spec.kind != "json_schema" or not self._strict:
            return None
        for path, schema in subschemas(json.loads(spec.source)):
            if isinstance(schema, dict) and (found := sorted(REFUSED & schema.keys())):
                return f"{', '.join(found)} at {path} cannot be enforced"
        return None

    def compile(self, spec: GrammarSpec) -> _Grammar:
        matcher = LLMatcher(self._tokenizer, self._source(spec), log_level=0)
        if matcher.is_error():
            raise ValueError(_said(matcher))
        return _Grammar(matcher, self._vocab_size)

    def _source(self, spec: GrammarSpec) -> str:
        match spec.kind:
            case "json_schema" | "json_object":
                return self._json(spec)
            case "regex":
                return str(LLMatcher.grammar_from_regex(spec.source))
            case "choice":
                choices = "|".join(map(_escaped, json.loads(spec.source)))
                return str(LLMatcher.grammar_from_regex(choices))
            case _:
                return str(LLMatcher.grammar_from_lark(_lark(spec.source)))

    def _json(self, spec: GrammarSpec) -> str:
        schema = {"type": "object"} if spec.kind == "json_object" else json.loads(spec.source)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError("no value matches the schema false")
        # The library reads its own options from the schema, which is its author's, not the server's.
        schema.pop("x-guidance", None)
        whitespace = spec.options.get("whitespace_pattern", self._whitespace)
        options: Any = {"lenient": not self._strict, "whitespace_pattern": whitespace}
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))


class _Vocabulary:
    """What the library asks of a tokenizer: the bytes of each id."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        known = min(vocab_size, tokenizer.vocab_size)
        special = {token for token in tokenizer.special_ids if token < vocab_size}
        tokens = [tokenizer.token_bytes(i) for i in range(known)]
        # Names in place of bytes that no text has: such ids are allowed where a grammar names them.
        for i, data in enumerate(tokens):
            if not data:
                tokens[i] = b"<[%d]>" % i
                special.add(i)
        for i in range(known, vocab_size):
            tokens.append(b"<[%d]>" % i)
            special.add(i)
        self.tokens = [*tokens, b"<[end]>"]
        self.eos_token_id = vocab_size
        self.special_token_ids = [*sorted(special), vocab_size]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, add_special_tokens=False)


class _Grammar:
    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher  # never advanced
        self._vocab_size = vocab_size

    def matcher(self) -> _Matcher:
        return _Matcher(self._matcher.deep_copy(), self._vocab_size)


class _Matcher:
    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._line = np.zeros(vocab_size // 32 + 1, dtype=np.uint32)  # with the end's bit

    def fill(self, bitmask: Tensor, row: int) -> None:
        line = self._line
        self._matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
        self._check()
        line[self._vocab_size >> 5] &= ~np.uint32(1 << (self._vocab_size & 31))
        bitmask[row].numpy().view(np.uint32)[:] = line[: bitmask.shape[1]]

    def accept(self, token: int) -> bool:
        accepted: int = self._matcher.try_consume_tokens([token])
        self._check()
        return accepted == 1

    def rollback(self, count: int) -> None:
        if not self._matcher.rollback(count):
            raise ValueError(_said(self._matcher))

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_stopped()) and self.complete

    def _check(self) -> None:
        """The library reports what went wrong in a step, such as a grammar beyond its limits, by a
        state that it never leaves."""
        if self._matcher.is_error():
            raise ValueError(_said(self._matcher))


def _said(matcher: LLMatcher) -> str:
    """The library's words, without the state of its parser that follows them."""
    return str(matcher.get_error()).partition("\n<state>")[0]


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in SPECIAL_CHARACTERS else c for c in text)


def _lark(grammar: str) -> str:
    """Lark as it is; GBNF, whose rules are written with ``::=``, as Lark."""
    return str(any_to_lark(grammar)) if "::=" in grammar else grammar
