"""Chats: from messages and tools to a prompt, and from its outputs to what the parsers read in them.

``LLM``, ``AsyncLLM`` and the server all go through ``ChatProcessor.prepare`` and ``PreparedChat.create_parser``.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from treadle.api.parsers import Tool
from treadle.api.sampling_params import SamplingParams, StructuredOutputsParams
from treadle.errors import RequestError
from treadle.outputs import CompletionOutput, OutputPart, RequestOutput
from treadle.text.call_constraint import constraint_with_calls
from treadle.text.output_parser import OutputParser, merge_parts
from treadle.text.prompts import Prompt
from treadle.text.request_checks import check_json
from treadle.text.tool_choice import check_choice, parse_tools, to_structured_outputs

if TYPE_CHECKING:
    from treadle.text.input_processor import InputProcessor
    from treadle.text.parser_plugins import ParserPlugins
    from treadle.text.text_pool import TextPool

__all__ = (
    "THINKING_SWITCHES",
    "ChatOutputParser",
    "ChatProcessor",
    "Conversation",
    "PreparedChat",
    "run_inline",
)

T = TypeVar("T")

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""The template arguments that switch thinking on and off; a template ignores those of others."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat prompt is made from, and how its outputs are read.

    ``structured_output_backend`` compiles the grammar of a forced call; ``client`` is whose it is, as in ``Prompt``.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    structured_output_backend: str | None = None
    client: str = ""

    @property
    def asks_for_reasoning(self) -> bool:
        """Whether the arguments of the template switch thinking on."""
        arguments = self.chat_template_kwargs or {}
        return any(arguments.get(name) for name in THINKING_SWITCHES)

    @property
    def num_chars(self) -> int:
        """How much text there is to render."""
        return num_chars((self.messages, self.tools, self.chat_template_kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A chat that can be generated: ``prompt`` and ``params`` are those of ``generate``."""

    prompt: Prompt
    params: SamplingParams
    conversation: Conversation
    plugins: ParserPlugins
    """Whose parsers read the outputs, also if a plugin is reloaded meanwhile."""
    tools: Sequence[Tool] = ()
    tag_ids: frozenset[int] = frozenset()
    """Special tokens that only the parsers must see."""

    def create_parser(self) -> ChatOutputParser:
        """Return the parser of the outputs of one request."""
        return ChatOutputParser(self)


@dataclass(frozen=True, slots=True)
class ChatProcessor:
    """Prepares the chats of one model. Its coroutines wait only if there are ``texts``, or
    ``parser_plugins`` have a watchdog."""

    processor: InputProcessor
    parser_plugins: ParserPlugins
    texts: TextPool | None = None

    async def prepare(self, chat: Conversation, params: SamplingParams) -> PreparedChat:
        """Check the tools, render and encode the messages, and complete the parameters.

        Raises ``RequestError``.
        """
        parser_plugins = self.parser_plugins
        if chat.tools:
            check_json("tools", list(chat.tools))
        tools = parse_tools(chat.tools)
        choice = check_choice(chat.tool_choice, tools)
        changes: dict[str, Any] = {}
        if choice == "none":
            tools = []
        elif choice == "auto":
            if parser_plugins.tool_call_parser is not None:
                changes["structured_outputs"] = await constraint_with_calls(
                    tools, params.structured_outputs, parser_plugins, chat.structured_output_backend
                )
        else:
            if parser_plugins.tool_call_parser is None:
                known = ", ".join(parser_plugins.plugins.keys("tool_parsers")) or "none installed"
                raise RequestError(
                    "tool_choice needs a tool parser, and none matches this model: start the engine with "
                    f"tool_call_parser=NAME (known: {known}), or send tool_choice auto",
                    param="tool_choice",
                )
            forced_call = await parser_plugins.forced_call(tools, choice)
            changes["structured_outputs"] = msgspec.structs.replace(
                to_structured_outputs(forced_call), backend=chat.structured_output_backend
            )
        tags = await parser_plugins.tag_ids(tools=bool(tools), reasoning=chat.separate_reasoning)
        tag_ids = tags and tags & parser_plugins.need_tokenizer().special_token_ids
        if tag_ids:  # the parsers would not see them otherwise
            changes["skip_special_tokens"] = False
        constraint: StructuredOutputsParams | None = changes.get(
            "structured_outputs", params.structured_outputs
        )
        # It begins where the reasoning ends that the prompt opens, or the model that was asked to think.
        if constraint is not None and constraint.reasoning is None:
            changes["structured_outputs"] = msgspec.structs.replace(
                constraint,
                reasoning=parser_plugins.reasoning_parser,
                may_open_reasoning=chat.asks_for_reasoning,
            )
        prepared = PreparedChat(
            prompt=await self.render(
                chat, tools=bool(tools), must_fit=params.truncate_prompt_tokens is None
            ),
            params=params.replace(**changes) if changes else params,
            conversation=chat,
            plugins=parser_plugins,
            tools=tools,
            tag_ids=tag_ids if params.skip_special_tokens else frozenset(),
        )
        budget = params.thinking_token_budget
        if budget is None:
            return prepared
        return await parser_plugins.with_thinking_budget(prepared, budget)

    async def render(
        self, chat: Conversation, *, tools: bool = True, must_fit: bool = False
    ) -> Prompt:
        """Return the prompt of a conversation, text and ids; without its tools if not ``tools``.

        With ``must_fit`` it is not encoded if it is known to be too long. Raises ``RequestError``.
        """
        work = partial(self.processor.render, chat, tools=tools, must_fit=must_fit)
        if self.texts is None:
            return work()
        guard = getattr(self.processor.renderer, "guard", None)
        return await self.texts.run(
            work, chat.num_chars, client=chat.client, guard=guard, method="render"
        )


class ChatOutputParser:
    """Reads the outputs of one request in the order in which they come.

    The same for every ``output_kind``: deltas get what is new, others everything so far.
    """

    def __init__(self, chat: PreparedChat) -> None:
        self._chat = chat
        self._states: dict[int, _OutputState | None] = {}

    async def parse(self, output: RequestOutput) -> RequestOutput:
        """Complete ``output`` in place and return it.

        Raises ``EngineError`` if a parser fails in strict mode.
        """
        for completion in output.outputs:
            if completion.index not in self._states:
                parser = self._chat.plugins.output_parser(self._chat)
                state = None if parser is None else _OutputState(parser, self._chat)
                self._states[completion.index] = state
            state = self._states[completion.index]
            if state is not None:
                await state.update(completion)
        return output


class _OutputState:
    """One output of a request while it grows."""

    def __init__(self, parser: OutputParser, chat: PreparedChat) -> None:
        self._parser = parser
        self._is_delta = chat.params.output_kind == "delta"
        self._on_failure = chat.plugins.on_failure
        self._filter = chat.plugins.token_filter() if chat.tag_ids else None
        self._num_chars = self._num_ids = 0
        self._reported: set[str] = set()
        self._parts: list[OutputPart] = []
        self._text = ""

    async def update(self, completion: CompletionOutput) -> None:
        text, ids = completion.text, completion.token_ids
        last = completion.finish_reason is not None
        if not self._is_delta:
            text, ids = text[self._num_chars :], ids[self._num_ids :]
            self._num_chars, self._num_ids = len(completion.text), len(completion.token_ids)
        try:
            parts = await self._parser.parse(text, ids, last=last)
        finally:
            failed = self._report_failures()
        if self._filter is not None:
            text = self._filter.feed(text, ids) + (self._filter.finish() if last else "")
        if self._is_delta:
            completion.parts, completion.parser_errors = parts, failed
        else:
            self._parts = completion.parts = merge_parts([*self._parts, *parts])
            completion.parser_errors = self._parser.failure
        if self._filter is not None:
            self._text = text if self._is_delta else self._text + text
            completion.text = self._text
        if completion.finish_reason == "stop" and self._parser.has_calls:
            completion.finish_reason = "tool_calls"

    def _report_failures(self) -> list[str]:
        """Return the parsers that have failed since the last call."""
        failed = [label for label in self._parser.failure if label not in self._reported]
        self._reported.update(failed)
        for label in failed:
            self._on_failure(label)
        return failed


def num_chars(value: Any, depth: int = 6) -> int:
    """Return the length of all texts in a value, as deep as chats usually are."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 0
    return sum(num_chars(item, depth - 1) for item in value) if depth else 0


def run_inline(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine that never waits returns, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise RuntimeError(f"{coroutine} waits, which needs an event loop")
