"""Compiles a grammar first in a process with limits: whoever sends a grammar chooses its cost."""

from __future__ import annotations

import gc
import os
import signal
import threading
from time import process_time

import msgspec

from treadle.api.kinds import STRUCTURED_OUTPUT
from treadle.api.structured_output import GrammarCompiler, GrammarSpec, SupportsUnenforced
from treadle.config import EngineConfig
from treadle.errors import PluginLoadError, RequestError
from treadle.plugins import PluginManager, PluginSelection
from treadle.processes.fork_server import ForkServer, serve_forks
from treadle.processes.isolated import (
    ProcessExit,
    anonymous_bytes,
    limit_cpu,
    limit_memory,
    resident,
)
from treadle.text.assets import open_checkpoint

__all__ = ("CPU_SECONDS", "CheckResult", "GrammarChecker", "TooSlow", "main")

CPU_SECONDS = 2.0
MEMORY = 512 << 20
LARGE = 8 << 20
MAX_NOTES = 4096
# A fork is killed by its CPU time; this is for one that sleeps, and for a busy machine.
WALL_SECONDS = 30.0
SLOW_NICENESS = 5


class TooSlow(Exception):
    """A grammar is not compiled within fewer seconds than it may have."""


class _CheckerSetup(msgspec.Struct, array_like=True):
    config: EngineConfig
    selection: PluginSelection
    vocab_size: int
    backend: str


class _CheckRequest(msgspec.Struct, array_like=True):
    spec: GrammarSpec
    seconds: float


class CheckResult(msgspec.Struct, array_like=True):
    """``size`` is the memory that a grammar keeps, in bytes; ``seconds`` the CPU time it took.

    ``rejection`` says why the backend would not enforce it, ``error`` why it cannot be compiled,
    ``unenforced`` what the output need not obey although the grammar was accepted.
    """

    size: int = 0
    seconds: float = 0.0
    rejection: str | None = None
    error: str | None = None
    unenforced: str | None = None


class GrammarChecker:
    """Tells whether a grammar compiles within the limits. Safe in threads.

    There is one child for each backend, because a vocabulary's tables count as its memory. It forks
    for each grammar, so that one that is killed costs no other anything.
    """

    def __init__(self, config: EngineConfig, plugins: PluginManager, vocab_size: int) -> None:
        self._config, self._plugins, self._vocab_size = config, plugins, vocab_size
        self._children: dict[str, ForkServer] = {}
        self._lock = threading.Lock()
        self._closed = False

    def check(self, backend: str, spec: GrammarSpec, seconds: float) -> CheckResult:
        """Raises ``RequestError`` for a grammar that is wrong or beyond the limits, ``TooSlow`` for
        one that takes more than ``seconds`` of CPU time, if it may have more."""
        question = msgspec.msgpack.encode(_CheckRequest(spec, seconds))
        try:
            data = self._child(backend).request(question, WALL_SECONDS)
        except ChildProcessError as error:
            raise PluginLoadError(
                f"grammars of {backend!r} cannot be compiled: {error}; the log has the details"
            ) from error
        except (ProcessExit, TimeoutError) as error:
            status = getattr(error, "status", None)
            if status == -signal.SIGPROF and seconds < CPU_SECONDS:
                raise TooSlow from error
            # Its own limits end it by SIGPROF, by an exit, or by the abort of an allocator.
            is_limit = status in (None, 1, -signal.SIGPROF, -signal.SIGABRT)
            reason = "" if is_limit else f" ({error})"
            raise RequestError(
                f"the grammar could not be compiled by {backend!r} within {CPU_SECONDS:g} s of CPU "
                f"time and {MEMORY >> 20} MiB{reason}; simplify it (long bounded repeats cost the "
                "most), or choose another guided_decoding_backend",
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

    def _child(self, backend: str) -> ForkServer:
        with self._lock:
            if self._closed:
                raise RequestError("the engine is being shut down", param="structured_outputs")
            if backend not in self._children:
                selection = self._plugins.selection()
                hello = _CheckerSetup(self._config, selection, self._vocab_size, backend)
                self._children[backend] = ForkServer(
                    "treadle.structured_output.checker:main", msgspec.msgpack.encode(hello)
                )
            return self._children[backend]


def main(fd: int) -> None:
    """The entry of the child; ``fd`` is its end of a socket pair."""
    child = _Child()
    serve_forks(fd, child.set_up, child.check)


class _Child:
    """Compiles with one backend."""

    def set_up(self, data: bytes) -> None:
        hello = msgspec.msgpack.decode(data, type=_CheckerSetup)
        plugins = PluginManager.from_selection(hello.selection, hello.config.plugins)
        own = plugins.choose(STRUCTURED_OUTPUT.name, hello.backend).plugin
        # This process is killed as that of an isolated plugin is, and forks cannot share its socket.
        plugins.loader.isolated = {name for name in plugins.loader.isolated if name != own}
        tokenizer = open_checkpoint(hello.config, plugins).need_tokenizer()
        self._compiler: GrammarCompiler = plugins.create(
            STRUCTURED_OUTPUT, hello.backend, tokenizer=tokenizer, vocab_size=hello.vocab_size
        )
        resident()  # once, as freeing memory in a fork copies it first
        gc.freeze()  # a vocabulary is large, and each collection in a fork would copy it

    def check(self, data: bytes) -> bytes:
        """Runs in a fork."""
        question = msgspec.msgpack.decode(data, type=_CheckRequest)
        limit_memory(MEMORY)
        limit_cpu(question.seconds)
        if question.seconds == CPU_SECONDS:
            os.nice(SLOW_NICENESS)
        return msgspec.msgpack.encode(_checked(self._compiler, question.spec))


def _checked(compiler: GrammarCompiler, spec: GrammarSpec) -> CheckResult:
    base_bytes = anonymous_bytes()
    try:
        if (refusal := compiler.unsupported_reason(spec)) is not None:
            return CheckResult(rejection=str(refusal))
        grammar = compiler.compile(spec)
        grammar.matcher()
        notes = compiler.unenforced(spec) if isinstance(compiler, SupportsUnenforced) else None
        grammar_bytes = anonymous_bytes() - base_bytes
        if grammar_bytes > LARGE:  # some of it may be what compiling has left behind
            grammar_bytes = resident() - base_bytes
    except (MemoryError, SystemExit, KeyboardInterrupt):
        raise SystemExit(1) from None  # whatever is left of this process is not to be trusted
    except BaseException as error:  # a panic of a Rust library is no Exception
        return CheckResult(error=str(error) or type(error).__name__)
    return CheckResult(
        max(0, grammar_bytes), process_time(), unenforced=notes and str(notes)[:MAX_NOTES]
    )
