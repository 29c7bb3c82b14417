"""Where grammars are ordered, compiled and filled into masks."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

from treadle.api.kinds import REASONING_PARSERS, STRUCTURED_OUTPUT
from treadle.api.matching import ModelTraits
from treadle.api.parsers import SupportsReasoningOpener
from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.api.step_types import EngineInfo, GrammarOutput
from treadle.config import EngineConfig
from treadle.errors import EngineError, PluginLoadError, RequestError
from treadle.known_plugins import install_hint, known_distributions, known_keys
from treadle.loading.matching import NOTHING, candidates
from treadle.plugins import PluginManager
from treadle.structured_output.batch import GrammarBatch
from treadle.structured_output.compile_queue import CompileJob, CompileQueue
from treadle.structured_output.compilers import Compilers, SizedGrammar
from treadle.structured_output.spec import grammar_spec
from treadle.structured_output.state import StructuredOutputState, reason_of

__all__ = ("StructuredOutputManager", "preferred_order")


def preferred_order(plugins: PluginManager) -> list[str]:
    """Return the installed backends in the order in which they are tried if none is named.

    A backend says with ``treadle_match`` how good it is; one that has no such hook comes last, and one
    that answers ``None`` is for those who name it. A plugin with several keys is tried once, under the best.
    """
    keys: dict[str, str] = {}
    for candidate in candidates(plugins, STRUCTURED_OUTPUT, ModelTraits()):
        if candidate.reason == NOTHING:
            continue
        plugin = plugins.choose("structured_output", candidate.key).plugin
        keys.setdefault(plugin, candidate.key)
    return list(keys.values()) or plugins.keys("structured_output")


class StructuredOutputManager:
    """Compiles the grammars of requests beside the step loop, and fills masks inside it.

    Used by the engine's thread. Backends that the configuration names are made ready at once;
    otherwise nothing is started before the first request that needs a grammar.
    """

    def __init__(self, config: EngineConfig, plugins: PluginManager, info: EngineInfo) -> None:
        self._config = config
        self._plugins = plugins
        import torch  # not above: processes that compile grammars come by here without it

        self._vocab_size = info.vocab_size
        shape = config.scheduler.max_num_seqs, info.vocab_size // 32 + 1
        self._bitmask = torch.empty(shape, dtype=torch.int32)
        if info.device.startswith("cuda"):
            with contextlib.suppress(RuntimeError):  # /dev/shm is full
                self._bitmask.share_memory_()  # where the processes of a backend can write
        # Pinned, where the model is in this process: the device takes masks from where they are filled.
        self._pinned = torch.cuda.cudart() if torch.cuda.is_initialized() else None
        if self._pinned is not None:
            self._pinned.cudaHostRegister(self._bitmask.data_ptr(), self._bitmask.nbytes, 0)
        self._compilers = Compilers(config, plugins, info.vocab_size)
        self.queue = CompileQueue(self._compilers, config.scheduler.max_num_queued_grammars)
        # What is quick has its own thread: the others may all be busy with bad grammars.
        self._state_thread = ThreadPoolExecutor(1, thread_name_prefix="treadle-grammar-state")
        self._last: Callable[[], GrammarBatch | None] = lambda: None
        self._writers: set[Any] = set()  # SupportsGrammarBatches that have filled masks
        self._on_compiled = threading.Event()
        self._installed = plugins.keys("structured_output")
        for name in config.plugins.structured_output_backends:
            if name in self._installed:  # others are refused with each request
                self.queue.warm(name)

    @cached_property
    def _preferred(self) -> list[str]:
        return preferred_order(self._plugins)

    def validate(self, params: StructuredOutputsParams) -> None:
        """Raise ``RequestError`` for what is plainly wrong, without compiling anything."""
        grammar_spec(params)
        self._backends(params.backend)

    def submit(self, request: EngineRequest) -> Future[StructuredOutputState]:
        """Order the grammar of a request, which leaves by cancelling the future.

        Raises ``RequestError`` for what is plainly wrong, and ``QueueFullError``. The future raises
        ``RequestError``, and ``PluginLoadError`` for what is not the client's fault.
        """
        params = request.params.structured_outputs
        if params is None:
            raise RequestError("the request asks for no grammar", param="structured_outputs")
        spec = grammar_spec(params)
        compiled = self.queue.submit(spec, self._backends(params.backend), request.client)
        ready: Future[StructuredOutputState] = Future()
        ready.add_done_callback(lambda _: self._on_compiled.set())
        ready.add_done_callback(partial(self._leave, compiled))

        def create_state() -> StructuredOutputState:
            sized = compiled.result()
            is_reasoning = opener = None
            if params.reasoning:
                is_reasoning, opener = self._reasoning_gate(
                    params.reasoning, request.prompt_ids, params.may_open_reasoning
                )
            return StructuredOutputState(
                sized.grammar.matcher(),
                is_reasoning,
                opener,
                batches=sized.batches,
                unenforced=sized.unenforced,
                allowed_ids=request.params.allowed_token_ids,
                strict=self._plugins.switches.strict,
                on_failure=partial(self.queue.forget, compiled),
            )

        if compiled.done() and not params.reasoning:  # no sooner in a thread
            _complete_future(ready, create_state)
            return ready
        # A future keeps its callbacks, and a grammar that is kept must not keep the request.
        tasks = [partial(_complete_future, ready, create_state)]

        def start_task(_: Future[SizedGrammar]) -> None:
            with contextlib.suppress(RuntimeError):  # the manager was closed meanwhile
                self._state_thread.submit(tasks.pop())

        compiled.add_done_callback(start_task)
        return ready

    def _reasoning_gate(
        self, parser: str, prompt_ids: Sequence[int], may_open: bool
    ) -> tuple[Callable[[int], bool] | None, int | None]:
        """Return ``(is_reasoning, opener)`` for ``StructuredOutputState``. Raises ``PluginLoadError``.

        ``is_reasoning(token)`` consumes a generated token and returns whether the reasoning continues. ``opener``
        is the token that starts it, ``None`` if the prompt has. ``(None, None)``: the grammar applies from the
        first token, because there is no reasoning and none may begin (``may_open``) with a single token.
        """
        tokenizer = self._compilers.tokenizer
        prompt = tokenizer.decode(prompt_ids, skip_special_tokens=False)
        reasoning = self._plugins.create_guarded(
            REASONING_PARSERS, parser, tokenizer=tokenizer, prompt=prompt
        )
        tag = reasoning.opening_tag if isinstance(reasoning, SupportsReasoningOpener) else None
        ids = tokenizer.encode(tag, add_special_tokens=False) if tag else []
        if not reasoning.in_reasoning and (not may_open or len(ids) != 1):
            return None, None
        opener = ids[0] if ids else None
        stream = tokenizer.create_detokenizer(prompt_ids, skip_special_tokens=False)

        def is_reasoning(token: int) -> bool:
            reasoning.feed(stream.decode_next(token), [token])
            return reasoning.in_reasoning

        return is_reasoning, opener

    def _backends(self, backend_name: str | None) -> list[str]:
        """The backends that may serve a request, the best first."""
        installed = self._installed
        backends = [backend_name or "auto"]
        if backends == ["auto"]:
            backends = self._config.plugins.structured_output_backends
        # No other is tried in place of one that is named, which vLLM wants to be said.
        backends = [name.removesuffix(":no-fallback") for name in backends if name != "auto"]
        for name in backends:
            if name not in installed:
                raise RequestError(
                    f"guided_decoding_backend is {name!r}; installed are "
                    f"{', '.join(installed) or 'none'}",
                    param="guided_decoding_backend",
                )
        if backends:
            return backends
        if not installed:
            raise RequestError(
                "structured output needs a backend and none is installed; for one of "
                f"{', '.join(known_keys('structured_output'))}, {install_hint(*known_distributions('structured_output'))}",
                param="structured_outputs",
            )
        return self._preferred

    def _leave(self, job: CompileJob, ready: Future[StructuredOutputState]) -> None:
        if ready.cancelled():
            self.queue.release(job)

    def bitmasks(self, batch: GrammarBatch) -> GrammarOutput | None:
        """Return the bitmasks of ``batch``, at most ``max_num_seqs``, over those before; ``None`` without rows.

        The output of the step before must have come, as a device may still read its masks.
        """
        if self._last() is not batch:  # what is written ahead must not reach rows of others
            self._last = weakref.ref(batch)
            self._writers.update(batch.backends)
            for backend in self._writers:
                with contextlib.suppress(Exception):  # it fails again when it is asked for masks
                    backend.fill_bitmasks([], self._bitmask, [])
        batch.fill_bitmasks(self._bitmask, self._vocab_size)
        if not batch.rows:
            return None
        masks = self._bitmask[: len(batch.rows)].numpy()
        return GrammarOutput([row[0] for row in batch.rows], masks.data.cast("B"))

    def wait(self, seconds: float) -> None:
        """Wait until the next grammar is ready or has failed, or ``seconds``."""
        self._on_compiled.wait(seconds)
        self._on_compiled.clear()

    def close(self) -> None:
        """Leave what is being compiled to itself. May be called twice."""
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.cudaHostUnregister(self._bitmask.data_ptr())
        self._writers.clear()
        self.queue.close()
        self._state_thread.shutdown(wait=False, cancel_futures=True)


def _complete_future(
    ready: Future[StructuredOutputState], create_state: Callable[[], StructuredOutputState]
) -> None:
    """Complete ``ready`` whatever happens, unless its sequence does not wait any more."""
    if not ready.set_running_or_notify_cancel():
        return
    try:
        ready.set_result(create_state())
    except (RequestError, PluginLoadError, EngineError) as error:
        ready.set_exception(error)
    except BaseException as error:  # a panic of a Rust library is no Exception
        text = f"the grammar failed: {reason_of(error)}"
        ready.set_exception(RequestError(text, param="structured_outputs"))
