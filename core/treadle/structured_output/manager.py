"""Where grammars are ordered, compiled and filled into masks."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

from treadle.api.kinds import STRUCTURED_OUTPUT
from treadle.api.matching import ModelTraits
from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.api.step_types import EngineInfo, GrammarOutput
from treadle.api.structured_output import GrammarSpec
from treadle.config import EngineConfig
from treadle.errors import EngineError, PluginLoadError, RequestError, TreadleError
from treadle.known_plugins import install_hint, known_distributions, known_keys
from treadle.loading.matching import candidates
from treadle.plugins import PluginManager
from treadle.structured_output.compilers import Compilers, SizedGrammar
from treadle.structured_output.reasoning import reasoning_gate
from treadle.structured_output.spec import grammar_spec
from treadle.structured_output.state import StructuredOutputState

__all__ = ("GrammarFuture", "StructuredOutputManager", "preferred_order")

log = logging.getLogger("treadle.structured_output")

# SizedGrammar grammars that are kept; failures are kept too, so that a bad one costs its limits once.
MOST_GRAMMARS = 256
MOST_BYTES = 1 << 30
THREADS = 2


def preferred_order(plugins: PluginManager) -> list[str]:
    """Return the installed backends in the order in which they are tried if none is named.

    A backend says with ``treadle_match`` how good it is; one that does not comes last.
    """
    return [candidate.key for candidate in candidates(plugins, STRUCTURED_OUTPUT, ModelTraits())]


class GrammarFuture:
    """A grammar that was ordered for one sequence."""

    def __init__(self, ready: Future[StructuredOutputState]) -> None:
        self._ready = ready

    def result_if_done(self) -> StructuredOutputState | None:
        """The guide once it is ready, ``None`` until then. Raises ``RequestError``, and
        ``PluginLoadError`` for what is not the client's fault."""
        return self._ready.result() if self._ready.done() else None


class StructuredOutputManager:
    """Compiles the grammars of requests beside the step loop, and fills masks inside it.

    Used by the engine's thread. Backends that the configuration names are made ready at once;
    otherwise nothing is started before the first request that needs a grammar.
    """

    def __init__(self, config: EngineConfig, plugins: PluginManager, info: EngineInfo) -> None:
        self._config = config
        self._plugins = plugins
        self._vocab_size = info.vocab_size
        import torch  # not above: processes that compile grammars come by here without it

        self._bitmask = torch.empty((0, -(-info.vocab_size // 32)), dtype=torch.int32)
        self._grammars: OrderedDict[tuple[str, ...], Future[SizedGrammar]] = OrderedDict()
        self._threads: _Threads | None = None
        self._on_compiled = threading.Event()
        for name in config.plugins.structured_output_backends:
            if name in plugins.keys("structured_output"):  # others are refused with each request
                warmed = self._started().pool.submit(self._started().compilers.warm, name)
                warmed.add_done_callback(_tell)

    @cached_property
    def _preferred(self) -> list[str]:
        return preferred_order(self._plugins)

    # ----------------------------------------------------------------------------- ordering

    def validate(self, params: StructuredOutputsParams) -> None:
        """Raise ``RequestError`` for what is plainly wrong, without compiling anything."""
        grammar_spec(params)
        self._backends(params.backend)

    def submit(self, request: EngineRequest) -> GrammarFuture:
        """Order the grammar of a request. Raises ``RequestError`` for what is plainly wrong."""
        params = request.params.structured_outputs
        if params is None:
            raise RequestError("the request asks for no grammar", param="structured_outputs")
        spec = grammar_spec(params)
        compiled = self._compiled(spec, self._backends(params.backend))
        threads = self._started()
        ready: Future[StructuredOutputState] = Future()
        ready.add_done_callback(lambda _: self._on_compiled.set())

        def work() -> None:
            _complete_future(ready, guide)

        def guide() -> StructuredOutputState:
            made = compiled.result()
            strict = self._plugins.switches.strict
            return StructuredOutputState(made.grammar.matcher(), *gate(), strict=strict)

        def gate() -> tuple[Callable[[int], bool] | None, int | None]:
            if params.reasoning is None:
                return None, None
            tokenizer = threads.compilers.tokenizer
            return reasoning_gate(self._plugins, params.reasoning, tokenizer, request.prompt_ids)

        # A future keeps what it has called, and a grammar that is kept must not keep the request.
        once = [work]

        # In a thread of its own: the prompt may be long, and both others busy with bad grammars.
        def follow(_: Future[SizedGrammar]) -> None:
            with contextlib.suppress(RuntimeError):  # the desk was closed meanwhile
                threads.short.submit(once.pop())

        compiled.add_done_callback(follow)
        return GrammarFuture(ready)

    def _backends(self, named: str | None) -> list[str]:
        """The backends that may serve a request, the best first."""
        installed = self._plugins.keys("structured_output")
        wanted = [named] if named else self._config.plugins.structured_output_backends
        for name in wanted:
            if name not in installed:
                raise RequestError(
                    f"guided_decoding_backend is {name!r}; installed are "
                    f"{', '.join(installed) or 'none'}",
                    param="guided_decoding_backend",
                )
        if wanted:
            return list(wanted)
        if not installed:
            raise RequestError(
                "structured output needs a backend and none is installed; for one of "
                f"{', '.join(known_keys('structured_output'))}, {install_hint(*known_distributions('structured_output'))}",
                param="structured_outputs",
            )
        return self._preferred

    def _compiled(self, spec: GrammarSpec, backends: Sequence[str]) -> Future[SizedGrammar]:
        key = (*backends, spec.kind, spec.source, repr(sorted(spec.options.items())))
        kept = self._grammars.get(key)
        if kept is None or _is_retryable(kept):
            threads = self._started()
            kept = threads.pool.submit(threads.compilers.compile, spec, backends)
            self._grammars[key] = kept
        self._grammars.move_to_end(key)
        self._evict()
        return kept

    def _evict(self) -> None:
        """Forget the grammars that were used longest ago, as far as there are too many."""
        sizes = [_size(kept) for kept in self._grammars.values()]
        count, total = len(sizes), sum(sizes)
        for size in sizes[:-1]:
            if count <= MOST_GRAMMARS and total <= MOST_BYTES:
                return
            self._grammars.popitem(last=False)
            count, total = count - 1, total - size

    def _started(self) -> _Threads:
        if self._threads is None:
            self._threads = _Threads(Compilers(self._config, self._plugins, self._vocab_size))
        return self._threads

    # -------------------------------------------------------------------------------- steps

    def fill_bitmasks(
        self, rows: Sequence[tuple[int, StructuredOutputState, Collection[int]]]
    ) -> GrammarOutput:
        """Return the bitmasks of ``rows``: row of the step, its state, and its stop token ids."""
        if len(self._bitmask) < len(rows):
            self._bitmask = self._bitmask.new_empty((len(rows), self._bitmask.shape[1]))
        for line, (_, guide, stop_ids) in enumerate(rows):
            guide.fill_bitmask(self._bitmask, line, stop_ids)
        return GrammarOutput(
            [row for row, _, _ in rows], self._bitmask[: len(rows)].numpy().tobytes()
        )

    def wait(self, seconds: float) -> None:
        """There is nothing to do but to wait for a grammar: for the next that is ready or has
        failed, or ``seconds``."""
        self._on_compiled.wait(seconds)
        self._on_compiled.clear()

    def close(self) -> None:
        """Leave what is being compiled to itself. May be called twice."""
        if self._threads is not None:
            self._threads.pool.shutdown(wait=False, cancel_futures=True)
            self._threads.short.shutdown(wait=False, cancel_futures=True)
            self._threads.compilers.close()


class _Threads:
    """Two that compile, and one for what is quick."""

    def __init__(self, compilers: Compilers) -> None:
        self.compilers = compilers
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="treadle-grammar")
        self.short = ThreadPoolExecutor(1, thread_name_prefix="treadle-guide")


def _complete_future(
    ready: Future[StructuredOutputState], make: Callable[[], StructuredOutputState]
) -> None:
    """Complete ``ready`` whatever happens: a sequence waits for it."""
    try:
        ready.set_result(make())
    except (RequestError, PluginLoadError, EngineError) as error:
        ready.set_exception(error)
    except TreadleError as error:
        ready.set_exception(
            RequestError(f"the grammar failed: {error}", param="structured_outputs")
        )
    except BaseException as error:  # a panic of a Rust library is no Exception
        text = f"the grammar failed: {type(error).__name__}: {error}"
        ready.set_exception(RequestError(text, param="structured_outputs"))


def _tell(warmed: Future[None]) -> None:
    """A backend that cannot be made ready will fail each request; the log says so at once."""
    if not warmed.cancelled() and (error := warmed.exception()) is not None:
        log.error("%s", error, exc_info=error)


def _size(kept: Future[SizedGrammar]) -> int:
    failed = not kept.done() or kept.cancelled() or kept.exception() is not None
    return 0 if failed else kept.result().size


def _is_retryable(kept: Future[SizedGrammar]) -> bool:
    """Whether it failed for want of time on a busy machine, or because of a plugin and not of the
    grammar, and may be better next time."""
    if not kept.done() or kept.cancelled():
        return False
    error = kept.exception()
    cause = None if error is None else error.__cause__
    return isinstance(error, PluginLoadError) or isinstance(cause, TimeoutError)
