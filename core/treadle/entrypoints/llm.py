"""``LLM``: the engine inside the caller's own process, for offline work."""

from __future__ import annotations

import itertools
import logging
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams
from treadle.api.stats import EngineStats
from treadle.api.step_types import EngineInfo
from treadle.config import EngineConfig, set_library_environment
from treadle.entrypoints.progress import Progress
from treadle.errors import (
    EngineDeadError,
    EngineError,
    PluginLoadError,
    QueueFullError,
    RequestError,
)
from treadle.loading.formats import pin_revisions
from treadle.outputs import RequestOutput
from treadle.text.assets import open_checkpoint, open_engine
from treadle.text.chat import ChatProcessor, Conversation, PreparedChat, run_inline
from treadle.text.input_processor import InputProcessor
from treadle.text.output_processor import OutputProcessor, PreparedRequest, Sink
from treadle.text.prompts import Prompt, PromptInput, parse_prompts, prompt_at

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer

__all__ = ("LLM",)

log = logging.getLogger("treadle.engine")

Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """Generates text from prompts::

        with LLM(model="org/name") as llm:
            for output in llm.generate(["Hello, my name is"], SamplingParams(max_tokens=20)):
                print(output.outputs[0].text)

    Options are those of ``EngineConfig``, flat. Requests are checked before any of them runs, and
    a wrong one raises ``RequestError``. A request that fails later is reported in its own output
    (``finish_reason`` ``error``, the reason in ``error``), so that it does not cost the results of
    the others; if the engine itself fails, ``EngineError`` is raised.

    Not safe in threads: one thread at a time. Streams and calls of ``generate`` may be nested.
    """

    def __init__(
        self, model: str | None = None, *, config: EngineConfig | None = None, **options: Any
    ) -> None:
        """Load a model. Raises ``ConfigError``, ``CheckpointError`` or another ``TreadleError``."""
        # The callers of one thread wait for all of their prompts, and want the same result each time.
        options = {"max_step_ms": 0.0, **options}
        self.config, self._plugins = open_engine(config, model, options)
        config = pin_revisions(self.config, self._plugins)
        assets = open_checkpoint(config, self._plugins)
        set_library_environment()
        from treadle.engine.core import EngineCore  # brings torch, which reads its environment once

        try:
            self._core = EngineCore(config, self._plugins)
        except BaseException:
            assets.close()
            raise
        self._close = weakref.finalize(self, self._core.close)
        for line in self._core.info.report:
            log.info("%s", line)
        self._assets = assets
        self._processor = InputProcessor(self._core.info, assets)
        self._chat: ChatProcessor | None = None
        self._outputs = OutputProcessor(assets.guarded_tokenizer, self._core.info.eos_token_ids)
        self._failure: EngineError | None = None
        self._rejected: dict[str, RequestError | PluginLoadError] = {}

    @property
    def info(self) -> EngineInfo:
        return self._core.info

    @property
    def stats(self) -> EngineStats:
        return self._core.stats

    def get_tokenizer(self) -> Tokenizer:
        """Raises ``CheckpointError`` if the model has none."""
        return self._assets.need_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters uses: the checkpoint's ``generation_config.json``."""
        return self._assets.defaults

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts; the results are in the order of the prompts.

        A prompt is text, a list of ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
        ``sampling_params`` is one for all or one for each. Control-C aborts what runs and raises
        ``KeyboardInterrupt``; the engine stays usable. Raises ``RequestError`` for parameters that
        are wrong; a grammar is one that turns out to be so while the others run.
        """
        parsed_prompts = parse_prompts(prompts)
        count = len(parsed_prompts)
        params = map(self._final, _broadcast("sampling_params", sampling_params, count))
        ranks = _broadcast("priority", priority, count)
        return self._finish(self._prepare(parsed_prompts, params, ranks), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them, with the model's chat template.

        The outputs have ``content``, ``reasoning`` and ``tool_calls``, if a parser matches the model. ``tools`` are
        functions in the form of the OpenAI API; ``tool_choice`` is ``auto``, ``none``, ``required`` or a named
        function. ``options`` are the other fields of ``Conversation``: ``chat_template_kwargs``,
        ``add_generation_prompt``, ``continue_final_message``, ``parallel_tool_calls``, ``separate_reasoning``.
        """
        options |= {"tools": tools, "tool_choice": tool_choice}
        conversations = list(_conversations(messages))
        params_list = _broadcast("sampling_params", sampling_params, len(conversations))
        chats = [
            self._prepare_chat(conversation, self._final(params), options)
            for conversation, params in zip(conversations, params_list, strict=True)
        ]
        prepared = [self._processor.prepare(chat.prompt, chat.params) for chat in chats]
        outputs = self._finish(prepared, use_tqdm)
        return [
            run_inline(chat.create_parser().parse(output))
            for chat, output in zip(chats, outputs, strict=True)
        ]

    def stream(
        self, prompts: PromptInput | Sequence[PromptInput], sampling_params: Params = None
    ) -> Iterator[RequestOutput]:
        """Complete all prompts and yield each output as it grows, in whatever order it comes.

        ``output_kind`` of the parameters says whether an output holds all (``cumulative``) or what
        is new (``delta``). Closing the iterator aborts what still runs.
        """
        parsed_prompts = parse_prompts(prompts)
        params = _broadcast("sampling_params", sampling_params, len(parsed_prompts))
        return self._stream(self._prepare(parsed_prompts, params, itertools.repeat(None)))

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[RequestOutput]:
        """``stream`` for one conversation, with the arguments of ``chat``.

        With ``output_kind`` ``delta``, ``parts`` of an output are what is new, in order.
        """
        options |= {"tools": tools, "tool_choice": tool_choice}
        params = self._assets.defaults if sampling_params is None else sampling_params
        chat = self._prepare_chat(messages, params, options)
        stream = self._stream([self._processor.prepare(chat.prompt, chat.params)])
        parser = chat.create_parser()
        return (run_inline(parser.parse(output)) for output in stream)

    def shutdown(self) -> None:
        """Release the device. May be called twice; requests after it raise ``EngineDeadError``."""
        self._close()
        self._assets.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _final(self, params: SamplingParams | None) -> SamplingParams:
        """Nobody sees an output before it is finished, so none is made."""
        params = self._assets.defaults if params is None else params
        return params if params.output_kind == "final" else params.replace(output_kind="final")

    def _prepare(
        self,
        prompts: list[Prompt],
        params: Iterable[SamplingParams | None],
        priorities: Iterable[int | None],
    ) -> list[PreparedRequest]:
        prepared = []
        for i, (prompt, p, priority) in enumerate(zip(prompts, params, priorities, strict=False)):
            with prompt_at(i, len(prompts)):
                prepared.append(self._processor.prepare(prompt, p, priority=priority))
        return prepared

    def _prepare_chat(
        self, messages: Messages, params: SamplingParams, options: Mapping[str, Any]
    ) -> PreparedChat:
        if self._chat is None:
            self._chat = self._assets.chats(self.config, self._plugins, self._processor)
        chat = Conversation(messages=messages, **options)
        return run_inline(self._chat.prepare(chat, params))

    def _finish(self, prepared: list[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
        results: dict[str, RequestOutput] = {}
        with (
            Progress(len(prepared), use_tqdm) as progress,
            closing(self._stream(prepared)) as stream,
        ):
            for output in stream:
                progress.feed(output)
                results[output.request_id] = output
        return [results[request.id] for request in prepared]

    def _stream(self, prepared: list[PreparedRequest]) -> Generator[RequestOutput, None, None]:
        ready: deque[RequestOutput] = deque()
        num_unfinished = len(prepared)
        with self._running(prepared, ready.append) as feed:
            while num_unfinished:
                self._pump(prepared, feed)
                while ready:
                    output = ready.popleft()
                    num_unfinished -= output.finished
                    yield output

    @contextmanager
    def _running(
        self, prepared: list[PreparedRequest], sink: Sink
    ) -> Iterator[deque[EngineRequest]]:
        """Register requests and yield what is to be fed to the core; on the way out, abort what is not finished."""
        self._check_alive()
        with self._core_alive():
            for request in prepared:
                self._core.validate(request.sequences[0], is_checked=True)

        try:
            for request in prepared:
                self._outputs.add(request, sink)
            yield deque(itertools.chain.from_iterable(request.sequences for request in prepared))
        finally:
            for request in prepared:
                self._rejected.pop(request.id, None)
            ids = [i for request in prepared for i in self._outputs.drop(request.id)]
            if ids and self._failure is None and self._close.alive:
                with self._core_alive():
                    self._core.abort_requests(ids)
                    # Nobody else would take the steps that let the aborted ones go.
                    while not len(self._outputs) and self._core.has_work:
                        self._core.step()

    def _pump(self, prepared: list[PreparedRequest], feed: deque[EngineRequest]) -> None:
        """Give the core what it has room for, take one step and deliver it.

        Raises ``RequestError`` if the engine has refused one of ``prepared``: like a bad parameter,
        a bad grammar ends the whole call.
        """
        self._check_alive()
        with _defer_interrupt():
            with self._core_alive():
                self._feed(feed)
                outputs = self._core.step()
            for output in outputs:
                if (
                    output.param is not None
                    and (error := self._outputs.refusal(output)) is not None
                ):
                    self._rejected[self._outputs.request_of(output.id) or ""] = error
            aborts = self._outputs.process(outputs)
            if aborts:
                self._core.abort_requests(aborts)
        if self._rejected:  # perhaps a request of another stream, which will hear of it
            for request in prepared:
                if request.id in self._rejected:
                    raise self._rejected[request.id]

    @contextmanager
    def _core_alive(self) -> Iterator[None]:
        """Whatever leaves the core, but for a refusal, is its end."""
        try:
            yield
        except (RequestError, QueueFullError, PluginLoadError):
            raise
        except EngineError as error:
            self._failure = error
            raise
        except BaseException as error:  # half a step: nothing of it can be trusted
            text = f"a step was left in the middle by {type(error).__name__}: {error}"
            self._failure = EngineError(text)
            raise

    def _feed(self, feed: deque[EngineRequest]) -> None:
        """Add what a step has tokens for, or as many as run, whose tokens may be cached; the rest while it is computed."""
        tokens = self.config.scheduler.max_num_batched_tokens
        room = sys.maxsize if self._assets.priorities else tokens
        count = len(self._core.scheduler.running)
        while feed and (room > 0 or count > 0):
            request = feed[0]
            label = self._outputs.request_of(request.id)
            if label is not None:  # else it was ended before it began
                try:
                    self._core.add_request(request, is_checked=True)
                except QueueFullError:
                    return  # the rest waits here instead of in the engine
                except (RequestError, PluginLoadError) as error:
                    self._rejected[label] = error
                    feed.clear()
                    return
            is_shared = feed.popleft().prefix_leader is not None
            room, count = room - (1 if is_shared else len(request.prompt_ids)), count - 1

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(
                f"the engine has failed ({self._failure}); make a new LLM"
            ) from self._failure
        if not self._close.alive:
            raise EngineDeadError("this LLM was shut down; make a new one")


def _broadcast(name: str, value: Any, count: int) -> list[Any]:
    """One value for all, or a list with one for each."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts", param=name)
    return list(value)


def _conversations(messages: Any) -> Iterable[Messages]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(
            f"messages is {type(messages).__name__ if messages else 'empty'}; it must be a list of "
            "messages or a list of such lists",
            param="messages",
        )
    return [messages] if isinstance(messages[0], Mapping) else messages


@contextmanager
def _defer_interrupt() -> Iterator[None]:
    """Let Control-C wait until the step is complete: half a step would leave the engine in pieces.

    A second one is not held back. Elsewhere than in the main thread, or where the program handles
    the signal itself, nothing changes.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    is_interrupted = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            signal.default_int_handler(number, frame)
        is_interrupted = True

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_interrupted:
        raise KeyboardInterrupt
