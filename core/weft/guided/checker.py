"""Compiles a grammar first in a process with limits: whoever sends a grammar chooses its cost."""

from __future__ import annotations

import threading
from typing import Any

import msgspec

from weft.api.guided import GrammarCompiler, GrammarSpec
from weft.config import EngineConfig
from weft.engine.isolated import IsolatedProcess, answer_questions, limit_cpu, limit_memory
from weft.errors import RequestError
from weft.plugins import Host, Plan

__all__ = ("GrammarChecker", "main", "open_compiler")

CPU_SECONDS = 2.0
MEMORY = 512 << 20
# The child is killed by its CPU time; this is for one that sleeps, and for a busy machine.
WALL_SECONDS = 30.0


class _Hello(msgspec.Struct, array_like=True):
    config: EngineConfig
    plan: Plan
    vocab_size: int


class _Question(msgspec.Struct, array_like=True):
    backend: str
    kind: str
    source: str
    options: dict[str, Any]


class GrammarChecker:
    """Tells whether a grammar compiles within the limits. Safe in threads.

    There is one child for each backend, because a vocabulary's tables count as its memory.
    """

    def __init__(self, config: EngineConfig, plan: Plan, vocab_size: int) -> None:
        self._hello = msgspec.msgpack.encode(_Hello(config, plan, vocab_size))
        self._children: dict[str, IsolatedProcess] = {}
        self._lock = threading.Lock()

    def check(self, backend: str, spec: GrammarSpec) -> None:
        """Raises ``RequestError`` for a grammar that is wrong, or beyond the limits."""
        with self._lock:
            child = self._children.get(backend)
            if child is None:
                child = IsolatedProcess("weft.guided.checker:main", self._hello)
                self._children[backend] = child
        question = _Question(backend, spec.kind, spec.source, dict(spec.options))
        try:
            why = child.ask(msgspec.msgpack.encode(question), WALL_SECONDS).decode()
        except OSError as error:
            raise RequestError(
                f"the grammar could not be compiled by {backend!r} within {CPU_SECONDS:g} s of CPU "
                f"time and {MEMORY >> 20} MiB; simplify it (long bounded repeats cost the most), "
                "or choose another guided_decoding_backend",
                param="guided",
            ) from error
        if why:
            raise RequestError(f"{backend} cannot compile the grammar: {why}", param="guided")

    def close(self) -> None:
        for child in self._children.values():
            child.close()


def open_compiler(
    config: EngineConfig, host: Host, backend: str, vocab_size: int
) -> GrammarCompiler:
    """The compiler of one backend for the model's vocabulary. Seconds for a large one."""
    from weft.frontend.opening import open_checkpoint

    tokenizer = open_checkpoint(config, host).need_tokenizer()
    return host.grammar_compiler(backend, tokenizer, vocab_size)


# ------------------------------------------------------------------------------- the child


def main(fd: int) -> None:
    """The entry of the child; ``fd`` is its end of a socket pair."""
    answer_questions(fd, _Child().answer)


class _Child:
    """Answers with an empty text for a grammar that compiles, and else with the reason."""

    def __init__(self) -> None:
        self._hello: _Hello | None = None
        self._host: Host | None = None
        self._compilers: dict[str, GrammarCompiler] = {}

    def answer(self, data: bytes) -> bytes:
        if self._hello is None:
            self._hello = msgspec.msgpack.decode(data, type=_Hello)
            self._host = Host.from_plan(self._hello.plan, self._hello.config.plugins)
            return b""
        question = msgspec.msgpack.decode(data, type=_Question)
        try:
            return self._compile(question).encode()
        except MemoryError:
            raise SystemExit(1) from None  # whatever is left of this process is not to be trusted
        except Exception as error:
            return (str(error) or type(error).__name__).encode()

    def _compile(self, question: _Question) -> str:
        if self._hello is None or self._host is None:
            return "the checker was not set up"
        if question.backend not in self._compilers:
            self._compilers[question.backend] = open_compiler(
                self._hello.config, self._host, question.backend, self._hello.vocab_size
            )
            limit_memory(MEMORY)
        limit_cpu(CPU_SECONDS)
        spec = GrammarSpec(question.kind, question.source, question.options)  # type: ignore[arg-type]
        self._compilers[question.backend].compile(spec)
        return ""
