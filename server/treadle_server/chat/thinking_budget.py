"""``thinking_token_budget``: the tokens of a thought, after which a logits processor ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from treadle.api.files import Tokenizer
from treadle.api.kinds import REASONING_PARSERS, TOOL_PARSERS
from treadle.api.parsers import (
    SupportsReasoningCloser,
    SupportsReasoningOpener,
    SupportsSpecialTags,
)
from treadle.api.sampling_params import SamplingParams
from treadle.errors import RequestError
from treadle.text.chat import PreparedChat
from treadle.text.parser_plugins import ParserPlugins

if TYPE_CHECKING:
    from treadle.entrypoints.async_llm import AsyncLLM
    from treadle_server.context import ServerContext

__all__ = ("budgeted", "with_thinking_budget")

PROCESSOR = "thinking_budget"
FIELD = "thinking_token_budget"
MAX_BUDGET = 2**31
"""More than any context has."""


class ThoughtTags(msgspec.Struct, frozen=True):
    """What a reasoning parser says of a prompt: whether it has opened a thought, and the tags."""

    is_open: bool
    opening: str | None
    closing: str | None
    others: Sequence[str]


def with_thinking_budget(engine: AsyncLLM) -> AsyncLLM:
    """Give an engine that is not running the processor that keeps budgets, if it is installed."""
    names = engine.config.plugins.logits_processors
    if PROCESSOR in engine.plugins.keys("logits_processors") and PROCESSOR not in names:
        plugins = msgspec.structs.replace(
            engine.config.plugins, logits_processors=[*names, PROCESSOR]
        )
        engine.config = msgspec.structs.replace(engine.config, plugins=plugins)
    return engine


async def budgeted(
    context: ServerContext, budget: int | None, chat: PreparedChat, hint: int | None = None
) -> SamplingParams:
    """Return the parameters of a chat whose thought takes at most ``budget`` tokens.

    ``hint`` is such a number that clients send whatever the model is; it is kept where it can be.
    Raises ``RequestError`` if thoughts of this model cannot be ended.
    """
    if budget is None:
        if hint is None or hint < 0:
            return chat.params
        try:
            return await budgeted(context, hint, chat)
        except RequestError:
            return chat.params
    if budget < 0:
        raise RequestError(f"{FIELD} is {budget}; it is 0 or more tokens", param=FIELD)
    if PROCESSOR not in context.engine.config.plugins.logits_processors:
        raise RequestError(
            f"{FIELD} needs the logits processor {PROCESSOR}, which is not installed here",
            param=FIELD,
        )
    parsers = chat.plugins
    if parsers.reasoning_parser is None or parsers.tokenizer is None:
        raise RequestError(
            f"{FIELD} needs a reasoning parser, and none matches this model", param=FIELD
        )
    tags = await parsers.call(
        REASONING_PARSERS,
        parsers.reasoning_parser,
        "closing_tag",
        lambda: thought_tags(parsers, chat),
    )
    if not tags.is_open and tags.opening is None:
        return chat.params  # the prompt has ended the thought, or there can be none
    if tags.closing is None:
        raise RequestError(
            f"{FIELD} cannot be kept: the reasoning parser {parsers.reasoning_parser} names no tag that ends "
            "a thought; leave it out, or bound the whole output with max_tokens",
            param=FIELD,
        )
    begin = parsers.tokenizer.encode(tags.opening or "", add_special_tokens=False)
    end = parsers.tokenizer.encode(tags.closing, add_special_tokens=False)
    special = parsers.tokenizer.special_token_ids
    is_spelled = len(end) > 1 and end[0] not in special
    if not end or is_spelled or (not tags.is_open and len(begin) != 1):
        raise RequestError(
            f"{FIELD} cannot be kept: the tags of {parsers.reasoning_parser} are no tokens of this model",
            param=FIELD,
        )
    others = (token_of(parsers.tokenizer, tag) for tag in tags.others)
    arguments = {
        "max_tokens": min(budget, MAX_BUDGET),
        "prompt_tokens": len(chat.prompt.ids or ()),
        "begin": begin or None,
        "end": end,
        "stops": sorted({i for i in others if i is not None} - {*begin})[:64],
    }
    return chat.params.replace(extra_args={**(chat.params.extra_args or {}), PROCESSOR: arguments})


def thought_tags(parsers: ParserPlugins, chat: PreparedChat) -> ThoughtTags:
    parser: Any = parsers.open(
        REASONING_PARSERS, parsers.reasoning_parser or "", prompt=chat.prompt.text or ""
    )[0]
    described = [parser]
    if chat.tools and parsers.tool_call_parser is not None:
        described.append(parsers.open(TOOL_PARSERS, parsers.tool_call_parser, tools=chat.tools)[0])
    return ThoughtTags(
        parser.in_reasoning,
        parser.opening_tag if isinstance(parser, SupportsReasoningOpener) else None,
        parser.closing_tag if isinstance(parser, SupportsReasoningCloser) else None,
        [tag for x in described if isinstance(x, SupportsSpecialTags) for tag in x.special_tags],
    )


def token_of(tokenizer: Tokenizer, tag: str) -> int | None:
    """Return the token of a tag, ``None`` if it is spelled by several."""
    ids = tokenizer.encode(tag, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None
