"""The backends' compilers, each opened once, and grammars compiled with them in threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.api.kinds import GUIDED
from treadle.api.structured_output import Grammar, GrammarCompiler, GrammarSpec
from treadle.config import EngineConfig
from treadle.errors import RequestError
from treadle.plugins import PluginManager
from treadle.structured_output.checker import GrammarChecker
from treadle.structured_output.state import Guide

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer

__all__ = ("Compiled", "Compilers", "open_tokenizer")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar, and the memory that it keeps in bytes, as far as that could be measured."""

    grammar: Grammar
    size: int


class Compilers:
    """Safe in threads."""

    def __init__(self, config: EngineConfig, host: PluginManager, vocab_size: int) -> None:
        self._config = config
        self._host = host
        self._vocab_size = vocab_size
        self._tokenizer: Tokenizer | None = None
        self._compilers: dict[str, GrammarCompiler] = {}
        self._opening = threading.Lock()
        self._checker = GrammarChecker(config, host.selection(), vocab_size)

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
            compiler = self._open(backend)
            try:
                verdict = self._checker.check(backend, spec)
            except RequestError:
                self._host.guard(GUIDED, backend).failed("compile")
                raise
            if verdict.refusal is None:
                compiled = Compiled(compiler.compile(spec), verdict.size)
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

        guide = Guide(compiled.grammar.matcher())
        guide.fill(torch.zeros((1, -(-self._vocab_size // 32)), dtype=torch.int32), 0, ())
        if guide.error is not None:
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
                self._compilers[backend] = self._host.create_guarded(
                    GUIDED, backend, tokenizer=self._open_tokenizer(), vocab_size=self._vocab_size
                )
            return self._compilers[backend]

    def _open_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(self._config, self._host)
        return self._tokenizer


def open_tokenizer(config: EngineConfig, host: PluginManager) -> Tokenizer:
    """The model's tokenizer. Raises ``CheckpointError`` if it has none."""
    from treadle.text.assets import open_checkpoint

    return open_checkpoint(config, host).need_tokenizer()
