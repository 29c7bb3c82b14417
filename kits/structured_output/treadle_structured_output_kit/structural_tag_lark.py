"""Structural tags as Lark grammars in the dialect of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.api.types import GrammarSpec, Tokenizer
from treadle_structured_output_kit import structural_tag as tags
from treadle_structured_output_kit.dialect import normalize_patterns
from treadle_structured_output_kit.equivalent import rewrite
from treadle_structured_output_kit.free_text import (
    Branch,
    Literal,
    Part,
    any_of,
    between_slashes,
    end_of,
    escaped,
    free_text,
    quoted,
    spelled,
)
from treadle_structured_output_kit.gbnf import is_gbnf
from treadle_structured_output_kit.gbnf_lark import gbnf_to_lark
from treadle_structured_output_kit.regex import JSON_WHITESPACE

__all__ = ("structural_tag_lark",)


def structural_tag_lark(
    source: str,
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    whitespace_pattern: str = JSON_WHITESPACE,
    lenient: bool = False,
) -> str:
    """Return the grammar of a structural tag. ``lenient`` ignores keywords that cannot be enforced.

    Raises ``ValueError`` for what is wrong.
    """
    options = {"whitespace_pattern": whitespace_pattern, "lenient": lenient}
    rules = _Rules(options, tokenizer, vocab_size)
    start = rules.expression(tags.parse_structural_tag(source))
    return "\n".join([f"start: {start or quoted('')}", *rules.lines])


class _Rules:
    def __init__(
        self, json_options: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int
    ) -> None:
        self.lines: list[str] = []
        self._json_options = json_options
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        names = {tokenizer.id_to_token(i): i for i in tokenizer.special_token_ids}
        self._special = {name: i for name, i in names.items() if name}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def expression(self, part: tags.Format, ends: Sequence[Literal] = ()) -> str:
        """Return the expression of a format, and of what ends it: one of ``ends``, if there are any."""
        match part:
            case tags.AnyText():
                return self._free([], ends, part.excludes, max_chars=part.max_chars)
            case tags.TriggeredTags():
                return self._triggered(part, ends)
            case tags.TokenTriggeredTags():
                triggers = {self._token(token) for token in part.trigger_tokens}
                branches = [self._branch(tag) for tag in part.tags]
                if not {branch.literal[0] for branch in branches} <= triggers:
                    raise ValueError(
                        "each tag of token_triggered_tags begins with one of its tokens"
                    )
                return self._free(
                    branches, ends, (), first=part.at_least_one, once=part.stop_after_first
                )
            case tags.Dispatch():
                rules = [
                    Branch(self._literal(text), self.expression(content))
                    for text, content in part.rules
                ]
                return self._free(rules, ends, part.excludes, once=not part.loop)
            case tags.Regex():
                return self._regex(part.pattern, ends)
            case tags.Elements():
                return self._sequence(part.elements, ends)
            case tags.Options():
                return any_of(self.expression(option, ends) for option in part.elements)
            case tags.AnyTokens():
                excluded = [*part.exclude_tokens, *self._end_tokens(ends)]
                return f"{self._any_token(excluded)}* {end_of(ends)}".strip()
        return f"{self._closed(part)} {end_of(ends)}".strip()

    def _closed(self, part: tags.Format) -> str:
        """Return the expression of a format whose end is its own."""
        match part:
            case tags.ConstString():
                return spelled(self._literal(part.value))
            case tags.JsonSchema():
                return self._add(self._json_rule(part.json_schema))
            case tags.Grammar():
                lark = gbnf_to_lark(part.grammar) if is_gbnf(part.grammar) else part.grammar
                return self._add(f"%lark {{\n{lark}\n}}")
            case tags.Token():
                return f"<[{self._token(part.token)}]>"
            case tags.ExcludeToken():
                return self._any_token(part.exclude_tokens)
            case tags.Tag():
                branch = self._branch(part)
                return f"{spelled(branch.literal)} {branch.rest}".strip()
            case tags.TagsWithSeparator():
                tag = self._add(any_of(self.expression(tag) for tag in part.tags))
                separator = spelled(self._literal(part.separator))
                more = "" if part.stop_after_first else f" ({separator} {tag})*"
                return f"({tag}{more})" if part.at_least_one else f"({tag}{more})?"
            case tags.Optional():
                return f"{self._inner(part.content)}?"
            case tags.Plus():
                return f"{self._inner(part.content)}+"
            case tags.Star():
                return f"{self._inner(part.content)}*"
            case tags.Repeat():
                most = "" if part.max < 0 else part.max
                return f"{self._inner(part.content)}{{{part.min},{most}}}"
        raise ValueError(f"a structural tag cannot have {type(part).__name__} here")

    def _json_rule(self, schema: Any) -> str:
        spec = normalize_patterns(GrammarSpec("json_schema", json.dumps(schema)))
        root = rewrite(json.loads(spec.source))
        if root is False:
            raise ValueError("no value matches the schema false")
        return f"%json {json.dumps({**({} if root is True else root), 'x-guidance': self._json_options})}"

    def _inner(self, part: tags.Format) -> str:
        return self._add(self.expression(part))

    def _branch(self, tag: tags.Tag) -> Branch:
        """Return a tag apart from its beginning."""
        is_text = isinstance(tag.begin, str)
        begin = self._literal(tag.begin) if isinstance(tag.begin, str) else self._id(tag.begin)
        if is_text and not tag.begin:
            raise ValueError("a tag needs a begin that is not empty")
        if isinstance(tag.end, tags.Token):
            ends = [self._id(tag.end)]
        else:
            texts = [tag.end] if isinstance(tag.end, str) else tag.end
            ends = [self._literal(text) for text in texts if text]
            if ends and len(ends) < len(texts):
                raise ValueError("one of several ends of a tag is empty")
        return Branch(begin, self.expression(tag.content, ends))

    def _triggered(self, part: tags.TriggeredTags, ends: Sequence[Literal]) -> str:
        triggers = [self._literal(text) for text in part.triggers]
        branches = []
        for tag in part.tags:
            branch = self._branch(tag)
            text = tag.begin if isinstance(tag.begin, str) else ""
            found = [trigger for trigger in part.triggers if trigger and text.startswith(trigger)]
            if len(found) != 1:
                raise ValueError(
                    f"the tag {text!r:.60} begins with {len(found)} of the triggers; it must be one"
                )
            trigger = triggers[part.triggers.index(found[0])]
            rest = spelled(self._literal(text[len(found[0]) :]))
            branches.append(Branch(trigger, f"{rest} {branch.rest}".strip()))
        return self._free(
            branches, ends, part.excludes, first=part.at_least_one, once=part.stop_after_first
        )

    def _free(
        self,
        branches: Sequence[Branch],
        ends: Sequence[Literal],
        excludes: Sequence[str],
        *,
        first: bool = False,
        once: bool = False,
        max_chars: int | None = None,
    ) -> str:
        return free_text(
            branches,
            ends,
            excludes,
            lexeme=self._lexeme,
            text_of=lambda token: self._tokenizer.id_to_token(token) or "",
            first=first,
            once=once,
            max_chars=max_chars,
        )

    def _regex(self, pattern: str, ends: Sequence[Literal]) -> str:
        body = between_slashes(normalize_patterns(GrammarSpec("regex", pattern)).source)
        if not ends:
            return self._lexeme(f"/{body}/")
        options = []
        for head, *rest in ends:
            tail = spelled(tuple(rest))
            if isinstance(head, int):
                options.append(f"{self._lexeme(f'/{body}/')} <[{head}]> {tail}".strip())
            else:
                options.append(f"{self._lexeme(f'/{body}/ /{escaped(head)}/')} {tail}".strip())
        return any_of(options)

    def _sequence(self, elements: Sequence[tags.Format], ends: Sequence[Literal]) -> str:
        """Return the elements one behind the other. What is open ends where the next begins."""
        if not elements:
            return end_of(ends)
        first, *others = elements
        if not others:
            return self.expression(first, ends)
        if not _is_open(first):
            return f"{self.expression(first)} {self._sequence(others, ends)}".strip()
        match others[0]:
            case tags.ConstString(value=text) if text:
                head = self.expression(first, [self._literal(text)])
                rest = self._sequence(others[1:], ends) if others[1:] else end_of(ends)
            case tags.Tag() as tag:
                branch = self._branch(tag)
                head = f"{self.expression(first, [branch.literal])} {branch.rest}"
                rest = self._sequence(others[1:], ends) if others[1:] else end_of(ends)
            case _:
                raise ValueError(
                    "free text and patterns must be the last element of a sequence, or be followed "
                    "by a const_string or a tag"
                )
        return f"{head} {rest}".strip()

    # ------------------------------------------------------------------------------ pieces

    def _literal(self, text: str) -> Literal:
        """Return a text as it is generated: special tokens in it are tokens."""
        parts: list[Part] = []
        position = 0
        for found in self._split.finditer(text):
            parts += [text[position : found.start()], self._special[found.group()]]
            position = found.end()
        return tuple(part for part in (*parts, text[position:]) if part != "")

    def _end_tokens(self, ends: Sequence[Literal]) -> list[int]:
        heads = [end[0] for end in ends]
        tokens = [head for head in heads if isinstance(head, int)]
        if len(tokens) < len(heads):
            raise ValueError("any_tokens ends with a token, not with a text")
        return tokens

    def _id(self, part: tags.Token) -> Literal:
        return (self._token(part.token),)

    def _token(self, token: int | str) -> int:
        if isinstance(token, str):
            if token not in self._special:
                raise ValueError(f"{token!r:.60} is no special token of the model")
            return self._special[token]
        if not 0 <= token < self._vocab_size:
            raise ValueError(f"the token {token} is not in the vocabulary of {self._vocab_size}")
        return token

    def _any_token(self, excluded: Sequence[int | str]) -> str:
        ids = ",".join(str(self._token(token)) for token in excluded)
        return f"<[^{ids}]>" if ids else "<[*]>"

    def _lexeme(self, body: str) -> str:
        name = f"TEXT_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _add(self, body: str) -> str:
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name


def _is_open(part: tags.Format) -> bool:
    """Whether a format ends only where something else begins."""
    match part:
        case tags.AnyText() | tags.TriggeredTags() | tags.TokenTriggeredTags() | tags.Dispatch():
            return True
        case tags.Regex():
            return True
        case tags.Elements() | tags.Options():
            return any(map(_is_open, part.elements))
    return False
