"""The backends' compilers, each opened once, and grammars compiled with them in threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.api.structured_output import Grammar, GrammarCompiler, GrammarSpec, Matcher
from treadle.config import EngineConfig
from treadle.errors import RequestError
from treadle.plugins import Host
from treadle.plugins.guard import Guard
from treadle.structured_output.checker import GrammarChecker
from treadle.structured_output.state import Guide

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer

__all__ = ("Compiled", "Compilers", "open_tokenizer")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar, what it keeps of memory as far as that could be measured, and its plugin's guard."""

    grammar: Grammar
    size: int
    guard: Guard | None = None

    def matcher(self) -> Matcher:
        if self.guard is None:
            return self.grammar.matcher()
        found: Matcher = self.guard.call(self.grammar, "matcher")
        return found


class Compilers:
    """Safe in threads."""

    def __init__(self, config: EngineConfig, host: Host, vocab_size: int) -> None:
        self._config = config
        self._host = host
        self._vocab_size = vocab_size
        self._tokenizer: Tokenizer | None = None
        self._compilers: dict[str, GrammarCompiler] = {}
        self._opening = threading.Lock()
        self._checker = GrammarChecker(config, host.plan(), vocab_size)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ``CheckpointError`` if the model has none."""
        with self._opening:
            return self._open_tokenizer()

    def compile(self, spec: GrammarSpec, backends: Sequence[str]) -> Compiled:
        """Compile with the first backend that does not refuse. Raises ``RequestError``, and
        ``PluginLoadError`` for what goes wrong here though it went well in the other process."""
        refusals = []
        for backend in backends:
            compiler, guard = self._open(backend), self._host.guard("guided", backend)
            try:
                verdict = self._checker.check(backend, spec)
            except RequestError:
                guard.failed("compile")
                raise
            if verdict.refusal is None:
                grammar = guard.call(compiler, "compile", spec)
                compiled = Compiled(grammar, verdict.size, guard)
                self._begin(backend, compiled)
                return compiled
            refusals.append(f"{backend}: {verdict.refusal}")
        raise RequestError(
            "no guided decoding backend can enforce this: " + "; ".join(refusals), param="guided"
        )

    def _begin(self, backend: str, compiled: Compiled) -> None:
        """Raise ``RequestError`` for a grammar without a first token; some libraries notice only
        when they are asked for it."""
        import torch  # not above: processes that compile grammars come by here without it

        guide = Guide(compiled.matcher())
        guide.fill(torch.zeros((1, -(-self._vocab_size // 32)), dtype=torch.int32), 0, ())
        if guide.error is not None:
            if compiled.guard is not None:
                compiled.guard.failed("fill")
            raise RequestError(f"{backend}: {guide.error}", param="guided")

    def warm(self, backend: str) -> None:
        """Make a backend ready here and in its process. Seconds for a large vocabulary."""
        self._open(backend)
        self._checker.start(backend)

    def close(self) -> None:
        self._checker.close()

    def _open(self, backend: str) -> GrammarCompiler:
        with self._opening:
            if backend not in self._compilers:
                self._compilers[backend] = self._host.grammar_compiler(
                    backend, self._open_tokenizer(), self._vocab_size
                )
            return self._compilers[backend]

    def _open_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(self._config, self._host)
        return self._tokenizer


def open_tokenizer(config: EngineConfig, host: Host) -> Tokenizer:
    """The model's tokenizer. Raises ``CheckpointError`` if it has none."""
    from treadle.text.assets import open_checkpoint

    return open_checkpoint(config, host).need_tokenizer()
