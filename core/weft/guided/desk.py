"""Where grammars are ordered, compiled and filled into masks."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from weft.api.guided import Grammar, GrammarCompiler, GrammarSpec
from weft.config import EngineConfig
from weft.engine.messages import EngineRequest
from weft.engine.plan import EngineFacts, StepEdits
from weft.errors import PluginError, RequestError, WeftError
from weft.guided.checker import GrammarChecker, open_compiler
from weft.guided.gate import reasoning_gate
from weft.guided.guide import Guide
from weft.guided.spec import grammar_spec
from weft.plugins import Host
from weft.sampling.params import GuidedParams

if TYPE_CHECKING:
    from weft.engine.request import Sequence as EngineSequence

__all__ = ("GrammarDesk", "Ticket")

# Compiled grammars that are kept; failures are kept too, so that a bad one costs its limits once.
MOST_GRAMMARS = 256
THREADS = 2
# The order of choice where neither request nor configuration names a backend: the fastest and the
# only one that refuses what it cannot enforce comes first.
PREFERRED = ("llguidance", "outlines", "lmfe")


class Ticket:
    """A grammar that was ordered for one sequence."""

    def __init__(self, ready: Future[Guide]) -> None:
        self._ready = ready

    def guide(self) -> Guide | None:
        """The guide once it is ready, ``None`` until then. Raises ``RequestError``."""
        return self._ready.result() if self._ready.done() else None


class GrammarDesk:
    """Compiles the grammars of requests beside the step loop, and fills masks inside it.

    ``submit``, ``masks`` and ``close`` are called from the engine's thread. Nothing is started
    before the first request that needs a grammar.
    """

    def __init__(self, config: EngineConfig, host: Host, facts: EngineFacts) -> None:
        self._config = config
        self._host = host
        self._vocab_size = facts.vocab_size
        self._words = -(-facts.vocab_size // 32)
        self._mask = torch.empty((0, self._words), dtype=torch.int32)
        self._pool: ThreadPoolExecutor | None = None
        self._checker: GrammarChecker | None = None
        self._compilers: dict[str, GrammarCompiler] = {}
        self._opening = threading.Lock()
        self._grammars: OrderedDict[tuple[str, ...], Future[Grammar]] = OrderedDict()

    # ----------------------------------------------------------------------------- ordering

    def validate(self, params: GuidedParams) -> None:
        """Raise ``RequestError`` for what is plainly wrong, without compiling anything."""
        grammar_spec(params)
        self._backends(params.backend)

    def submit(self, request: EngineRequest) -> Ticket:
        """Order the grammar of a request. Raises ``RequestError`` for what is plainly wrong."""
        params = request.params.guided
        if params is None:
            raise RequestError("the request asks for no grammar", param="guided")
        spec = grammar_spec(params)
        backends = self._backends(params.backend)
        gate = self._gate(request)
        ready: Future[Guide] = Future()

        def finish(compiled: Future[Grammar]) -> None:
            try:
                ready.set_result(Guide(compiled.result().matcher(), gate() if gate else None))
            except WeftError as error:
                ready.set_exception(_as_request_error(error))
            except Exception as error:
                text = f"the grammar failed: {type(error).__name__}: {error}"
                ready.set_exception(RequestError(text, param="guided"))

        self._compiled(spec, backends).add_done_callback(finish)
        return Ticket(ready)

    def _backends(self, named: str | None) -> list[str]:
        """The backends that may serve a request, the best first."""
        installed = self._host.keys("guided")
        wanted = [named] if named else self._config.plugins.guided_backends
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
                "guided decoding needs a backend and none is installed; install "
                "weft-guided-llguidance",
                param="guided",
            )
        rest = [name for name in installed if name not in PREFERRED]
        return [name for name in PREFERRED if name in installed] + rest

    def _gate(self, request: EngineRequest) -> Callable[[], Callable[[int], bool] | None] | None:
        name = request.params.guided.reasoning if request.params.guided else None
        if name is None:
            return None
        return lambda: reasoning_gate(self._config, self._host, name, request.prompt_ids)

    def _compiled(self, spec: GrammarSpec, backends: Sequence[str]) -> Future[Grammar]:
        key = (*backends, spec.kind, spec.source, repr(sorted(spec.options.items())))
        if key in self._grammars:
            self._grammars.move_to_end(key)
            return self._grammars[key]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="weft-grammar")
            self._checker = GrammarChecker(self._config, self._host.plan(), self._vocab_size)
        compiled = self._pool.submit(self._compile, spec, backends)
        self._grammars[key] = compiled
        if len(self._grammars) > MOST_GRAMMARS:
            self._grammars.popitem(last=False)
        return compiled

    # ---------------------------------------------------------------- in the pool's threads

    def _compile(self, spec: GrammarSpec, backends: Sequence[str]) -> Grammar:
        """Compile with the first backend that does not refuse."""
        refusals = []
        for backend in backends:
            compiler = self._compiler(backend)
            why = compiler.refuses(spec)
            if why is None:
                if self._checker is not None:
                    self._checker.check(backend, spec)
                return compiler.compile(spec)
            refusals.append(f"{backend}: {why}")
        raise RequestError(
            "no guided decoding backend can enforce this: " + "; ".join(refusals), param="guided"
        )

    def _compiler(self, backend: str) -> GrammarCompiler:
        with self._opening:
            if backend not in self._compilers:
                self._compilers[backend] = open_compiler(
                    self._config, self._host, backend, self._vocab_size
                )
            return self._compilers[backend]

    # -------------------------------------------------------------------------------- steps

    def masks(self, rows: list[tuple[int, EngineSequence]]) -> StepEdits:
        """The bitmasks of the rows whose grammar has a say about their next token."""
        if len(self._mask) < len(rows):
            self._mask = torch.empty((len(rows), self._words), dtype=torch.int32)
        used: list[int] = []
        for row, sequence in rows:
            guide = sequence.guide
            if guide is not None and not guide.gated:
                guide.fill(self._mask, len(used))
                used.append(row)
        return StepEdits(used, self._mask[: len(used)].numpy().tobytes())

    def wait(self, seconds: float) -> None:
        """There is nothing to do but to wait for a grammar."""
        time.sleep(seconds)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._checker is not None:
            self._checker.close()


def _as_request_error(error: WeftError) -> RequestError:
    """A failed grammar fails its request and nothing else, whoever is at fault."""
    if isinstance(error, RequestError):
        return error
    kind = "a plugin failed" if isinstance(error, PluginError) else "the grammar failed"
    return RequestError(f"{kind}: {error}", param="guided")
