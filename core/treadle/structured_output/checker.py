"""Compiles a grammar first in a process with limits: whoever sends a grammar chooses its cost."""

from __future__ import annotations

import gc
import threading

import msgspec

from treadle.api.kinds import STRUCTURED_OUTPUT
from treadle.api.structured_output import GrammarCompiler, GrammarSpec
from treadle.config import EngineConfig
from treadle.errors import RequestError
from treadle.plugins import PluginManager, PluginSelection
from treadle.processes.isolated import (
    IsolatedProcess,
    limit_cpu,
    limit_memory,
    resident,
    serve_requests,
)

__all__ = ("CheckResult", "GrammarChecker", "main")

CPU_SECONDS = 2.0
MEMORY = 512 << 20
# The child is killed by its CPU time; this is for one that sleeps, and for a busy machine.
WALL_SECONDS = 30.0


class _CheckerSetup(msgspec.Struct, array_like=True):
    config: EngineConfig
    selection: PluginSelection
    vocab_size: int
    backend: str


class CheckResult(msgspec.Struct, array_like=True):
    """``size`` is the memory that a grammar keeps, in bytes.

    ``rejection`` says why the backend would not enforce it, ``error`` why it cannot be compiled.
    """

    size: int = 0
    rejection: str | None = None
    error: str | None = None


class GrammarChecker:
    """Tells whether a grammar compiles within the limits. Safe in threads.

    There is one child for each backend, because a vocabulary's tables count as its memory.
    """

    def __init__(self, config: EngineConfig, plugins: PluginManager, vocab_size: int) -> None:
        self._config, self._plugins, self._vocab_size = config, plugins, vocab_size
        self._children: dict[str, IsolatedProcess] = {}
        self._lock = threading.Lock()
        self._closed = False

    def check(self, backend: str, spec: GrammarSpec) -> CheckResult:
        """Raises ``RequestError`` for a grammar that is wrong, or beyond the limits."""
        try:
            data = self._child(backend).request(msgspec.msgpack.encode(spec), WALL_SECONDS)
        except OSError as error:
            raise RequestError(
                f"the grammar could not be compiled by {backend!r} within {CPU_SECONDS:g} s of CPU "
                f"time and {MEMORY >> 20} MiB; simplify it (long bounded repeats cost the most), "
                "or choose another guided_decoding_backend",
                param="structured_outputs",
            ) from error
        verdict = msgspec.msgpack.decode(data, type=CheckResult)
        if verdict.error is not None:
            raise RequestError(
                f"{backend} cannot compile the grammar: {verdict.error}", param="structured_outputs"
            )
        return verdict

    def start(self, backend: str) -> None:
        """Start the child of a backend before its first question."""
        self._child(backend).start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for child in self._children.values():
                child.close()

    def _child(self, backend: str) -> IsolatedProcess:
        with self._lock:
            if self._closed:
                raise RequestError("the engine is being shut down", param="structured_outputs")
            if backend not in self._children:
                selection = self._plugins.selection()
                hello = _CheckerSetup(self._config, selection, self._vocab_size, backend)
                self._children[backend] = IsolatedProcess(
                    "treadle.structured_output.checker:main", msgspec.msgpack.encode(hello)
                )
            return self._children[backend]


# ------------------------------------------------------------------------------- the child


def main(fd: int) -> None:
    """The entry of the child; ``fd`` is its end of a socket pair."""
    serve_requests(fd, _Child().check)


class _Child:
    """Compiles with one backend, and forgets what it has compiled."""

    def __init__(self) -> None:
        self._compiler: GrammarCompiler | None = None

    def check(self, data: bytes) -> bytes:
        if self._compiler is None:
            return self._set_up(msgspec.msgpack.decode(data, type=_CheckerSetup))
        spec = msgspec.msgpack.decode(data, type=GrammarSpec)
        return msgspec.msgpack.encode(_checked(self._compiler, spec))

    def _set_up(self, hello: _CheckerSetup) -> bytes:
        from treadle.structured_output.compilers import open_tokenizer

        plugins = PluginManager.from_selection(hello.selection, hello.config.plugins)
        tokenizer = open_tokenizer(hello.config, plugins)
        self._compiler = plugins.create(
            STRUCTURED_OUTPUT, hello.backend, tokenizer=tokenizer, vocab_size=hello.vocab_size
        )
        gc.freeze()  # a vocabulary is large, and each measurement of a grammar would look through it
        limit_memory(MEMORY)
        return b""


def _checked(compiler: GrammarCompiler, spec: GrammarSpec) -> CheckResult:
    base_bytes = resident()
    limit_cpu(CPU_SECONDS)
    try:
        if (refusal := compiler.unsupported_reason(spec)) is not None:
            return CheckResult(rejection=str(refusal))
        grammar = compiler.compile(spec)
        grammar.matcher()
        grammar_bytes = resident() - base_bytes
    except (MemoryError, SystemExit, KeyboardInterrupt):
        raise SystemExit(1) from None  # whatever is left of this process is not to be trusted
    except BaseException as error:  # a panic of a Rust library is no Exception
        return CheckResult(error=str(error) or type(error).__name__)
    return CheckResult(max(0, grammar_bytes))
