"""From a chat request to prompt ids and sampling parameters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from treadle.api.sampling_params import BOUNDS, SamplingParams
from treadle.errors import ContextLengthError, RequestError
from treadle.plugins import PluginManager
from treadle.text.input_processor import CHARS_PER_TOKEN
from treadle_server.chat.tools import Toolbox, toolbox
from treadle_server.context import Context
from treadle_server.messages import template_arguments, to_messages
from treadle_server.parsing import WatchedSplitter
from treadle_server.sampling import to_params
from treadle_server.wire.chat import ChatRequest
from treadle_server.wire.messages import Message

__all__ = ("Chat", "prepare", "render")

UNSET = SamplingParams().max_tokens


class Chat(msgspec.Struct, kw_only=True):
    """A chat request, ready for the engine."""

    id: str
    created: int
    request: ChatRequest
    text: str
    ids: list[int]
    params: SamplingParams
    tools: Toolbox
    top_logprobs: int
    host: PluginManager
    """Whose parsers read the outputs, whatever is reloaded meanwhile."""
    hidden: frozenset[int] = frozenset()
    """Special tokens in the engine's text that are not for the client."""

    def splitter(self, context: Context) -> WatchedSplitter | None:
        """Fresh parsers for one of the outputs."""
        return context.splitter(
            self.text,
            self.tools.parsed,
            host=self.host,
            reasoning=self.request.separate_reasoning is not False,
            parallel=self.request.parallel_tool_calls is not False,
            hidden=self.hidden,
        )


async def prepare(context: Context, request: ChatRequest) -> Chat:
    """Render, encode and check. Raises ``RequestError`` or ``APIError``."""
    context.check_model(request.model)
    host, tools = context.engine.host, await toolbox(request, context)
    marks = await context.marks.of(
        tools=bool(tools.parsed), reasoning=request.separate_reasoning is not False
    )
    text, ids = await render(
        context,
        request.messages,
        tools.rendered,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        arguments=template_arguments(
            request.chat_template_kwargs,
            request.documents,
            reasoning_effort=request.reasoning_effort,
        ),
    )
    changes: dict[str, Any] = {"max_tokens": most_tokens(request, context.defaults)}
    if tools.guided is not None:  # a call, and not the format that messages must have
        changes["guided"] = msgspec.structs.replace(
            tools.guided, backend=request.guided_decoding_backend
        )
    if marks:  # the parsers would not see them otherwise
        changes["skip_special_tokens"] = False
    top = top_logprobs(request)
    if request.logprobs:
        changes["logprobs"] = top
    return Chat(
        id=context.new_id("chatcmpl"),
        created=int(time.time()),
        request=request,
        text=text,
        ids=ids,
        params=behind_reasoning(
            context.granted(
                to_params(request, context.defaults, context.engine.facts.max_model_len, **changes)
            ),
            context.config.reasoning_parser,
        ),
        tools=tools,
        top_logprobs=top,
        host=host,
        hidden=hidden(context, request, marks),
    )


def behind_reasoning(params: SamplingParams, parser: str | None) -> SamplingParams:
    """What the output must match begins where the reasoning ends, if the prompt has opened one."""
    if params.guided is None or parser is None:
        return params
    return params.replace(guided=msgspec.structs.replace(params.guided, reasoning=parser))


def hidden(context: Context, request: ChatRequest, marks: frozenset[int]) -> frozenset[int]:
    """The special tokens that the engine shows for the sake of ``marks`` alone."""
    if not marks or request.skip_special_tokens is False:
        return frozenset()
    return context.engine.tokenizer.special_ids - marks


async def render(
    context: Context,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    arguments: dict[str, Any],
) -> tuple[str, list[int]]:
    """The prompt of a conversation as text and as ids."""
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message exclude each other; set one of them",
            param="continue_final_message",
        )
    plain = to_messages(messages, knows_developer=context.knows_developer)
    carry_on = bool(continue_final_message)
    if carry_on and plain[-1]["role"] != "assistant":
        raise RequestError(
            f"continue_final_message needs a last message of the assistant, not {plain[-1]['role']}",
            param="continue_final_message",
        )
    renderer = context.engine.renderer
    if renderer is None:
        raise RequestError(
            "this model has no tokenizer, so it cannot chat; send token ids to /v1/completions",
            param="messages",
        )
    most = context.engine.facts.max_model_len * CHARS_PER_TOKEN

    def work() -> tuple[str, list[int]]:
        text = renderer.render(
            plain,
            tools=tools,
            add_generation_prompt=not carry_on
            if add_generation_prompt is None
            else add_generation_prompt,
            continue_final_message=carry_on,
            template_arguments=arguments,
        )
        if len(text) > most:  # encoding it would take long, and be in vain
            raise ContextLengthError(
                f"the conversation has {len(text)} characters; this model's context holds at most "
                f"{most}: send less",
                param="messages",
            )
        return text, renderer.encode(text)

    return await context.rendered(work)


def most_tokens(request: ChatRequest, defaults: SamplingParams) -> int | None:
    """Unlike a completion, a chat answer may fill the context unless the model's defaults say so."""
    for given in (request.max_completion_tokens, request.max_tokens):
        if given is not None:
            return given
    return None if defaults.max_tokens == UNSET else defaults.max_tokens


def top_logprobs(request: ChatRequest) -> int:
    top = request.top_logprobs
    if top is None:
        return 0
    if not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    low, high = BOUNDS["logprobs"]
    if not low <= top <= high:
        raise RequestError(
            f"top_logprobs is {top}; it must be in [{low}, {high}]", param="top_logprobs"
        )
    return top
