"""Special tokens that parsers must see, and those that nobody should.

Special tokens are left out of an answer's text. Some formats are written with them (Mistral's
``[TOOL_CALLS]``): then the engine is asked for all, and those that no parser named are taken out
here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from treadle.api.files import Tokenizer
from treadle.api.kinds import REASONING, TOOL_PARSERS
from treadle.api.parsers import Tagged
from treadle.errors import PluginLoadError
from treadle.text.partial_match import partial_match_len

if TYPE_CHECKING:
    from treadle_server.context import Context

__all__ = ("Marks", "Sieve")

log = logging.getLogger("treadle.server")


class Marks:
    """The special tokens that each parser of a server names, asked for once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: dict[str, frozenset[int]] = {}

    async def of(self, *, tools: bool, reasoning: bool) -> frozenset[int]:
        """What the parsers of one request need."""
        config, engine = self._context.config, self._context.engine
        found: frozenset[int] = frozenset()
        if tools and (name := config.tool_parser) is not None:
            build = partial(
                engine.host.create, TOOL_PARSERS, name, tokenizer=engine.tokenizer, tools=()
            )
            found |= await self._named("tool_parsers", name, build)
        if reasoning and (name := config.reasoning_parser) is not None:
            think = partial(
                engine.host.create, REASONING, name, tokenizer=engine.tokenizer, prompt=""
            )
            found |= await self._named("reasoning", name, think)
        return found

    async def _named(self, kind: str, name: str, build: Callable[[], Any]) -> frozenset[int]:
        label, context = f"{kind}:{name}", self._context
        if label not in self._known:
            try:
                tags = await context.asked(kind, name, "tags", lambda: tags_of(build()))
            except PluginLoadError as error:  # each answer will tell
                log.warning("it is not known which tags %s reads: %s", label, error, exc_info=error)
                tags = set()
            tokenizer = context.engine.tokenizer
            ids = tokenizer.special_ids if tags else ()
            self._known[label] = frozenset(i for i in ids if tokenizer.token(i) in tags)
        return self._known[label]


def tags_of(parser: object) -> set[str]:
    return set(parser.tags) if isinstance(parser, Tagged) else set()


class Sieve:
    """Takes the texts of the tokens ``hidden`` out of one output's text.

    Only where such a token was generated: the same characters, written with other tokens, are text
    (of two in one piece, the first is taken for the token's). A text may come later than its id,
    because it may be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._owed: list[str] = []
        self.carry = ""

    def feed(self, text: str, ids: Sequence[int]) -> str:
        self._owed += [self._tokenizer.token(i) for i in ids if i in self._hidden]
        if not self._owed and not self.carry:
            return text
        text, self.carry = self.carry + text, ""
        kept = []
        while self._owed:
            before, mark, behind = text.partition(self._owed[0])
            if not mark:
                at = len(text) - partial_match_len(text, self._owed[:1])
                text, self.carry = text[:at], text[at:]
                break
            kept.append(before)
            text = behind
            del self._owed[0]
        return "".join(kept) + text

    def finish(self) -> str:
        carry, self.carry = self.carry, ""
        return carry
