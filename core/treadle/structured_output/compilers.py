"""The backends' compilers, each opened once, and grammars compiled with them in threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from treadle.api.kinds import STRUCTURED_OUTPUT
from treadle.api.structured_output import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarSpec,
    SupportsGrammarBatches,
)
from treadle.config import EngineConfig
from treadle.errors import RequestError
from treadle.plugins import PluginManager
from treadle.structured_output.checker import CPU_SECONDS, GrammarChecker
from treadle.structured_output.state import StructuredOutputState
from treadle.text.assets import open_checkpoint

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer

__all__ = ("Compilers", "SizedGrammar")


@dataclass(frozen=True, slots=True)
class SizedGrammar:
    """A grammar, the bytes that it keeps, as far as measured, the CPU seconds of its compilation, its backend if
    that advances many sequences together, and what the output need not obey."""

    grammar: CompiledGrammar
    size: int
    seconds: float = 0.0
    batches: SupportsGrammarBatches | None = None
    unenforced: str | None = None


class Compilers:
    """Safe in threads."""

    def __init__(self, config: EngineConfig, plugins: PluginManager, vocab_size: int) -> None:
        self._config = config
        self._plugins = plugins
        self._vocab_size = vocab_size
        self._compilers: dict[str, GrammarCompiler] = {}
        self._opening = threading.RLock()
        self._checker = GrammarChecker(config, plugins, vocab_size)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Read when the first backend is opened. Raises ``CheckpointError`` if the model has none."""
        return open_checkpoint(self._config, self._plugins).need_tokenizer()

    def compile(
        self, spec: GrammarSpec, backends: Sequence[str], seconds: float = CPU_SECONDS
    ) -> SizedGrammar:
        """Compile with the first backend that can enforce it, or with the first one if it is not strict.

        Raises ``RequestError``, ``TooSlow`` after ``seconds`` of CPU time, and ``PluginLoadError`` if it fails here only.
        """
        refusals: list[str] = []
        rejections: dict[str, str] = {}
        strict = replace(spec, options={k: v for k, v in spec.options.items() if k != "strict"})
        specs = [strict] if spec == strict else [strict, spec]
        for spec, backend in itertools.product(specs, backends):
            compiler = self._open(backend)
            try:
                verdict = self._checker.check(backend, spec, seconds)
                if verdict.rejection is None:
                    batches = compiler if isinstance(compiler, SupportsGrammarBatches) else None
                    compiled = SizedGrammar(
                        compiler.compile(spec),
                        verdict.size,
                        verdict.seconds,
                        batches,
                        verdict.unenforced or rejections.get(backend),
                    )
                    state = StructuredOutputState(compiled.grammar.matcher())
                    # Any id may end an empty output, if it is complete.
                    state.check_first_token(self._vocab_size, (0,))
                    if state.error is None:
                        return compiled
                    raise RequestError(f"{backend}: {state.error}", param="structured_outputs")
                rejections[backend] = verdict.rejection
                refusals.append(f"{backend}: {verdict.rejection}")
            except RequestError as error:
                self._plugins.guard(STRUCTURED_OUTPUT, backend).counter("compile").record_failure()
                if error.__cause__ is not None:  # a limit: it may cost as much once only
                    raise
                refusals.append(str(error))
        raise RequestError(
            "no structured output backend can enforce this: " + "; ".join(refusals),
            param="structured_outputs",
        )

    def warm(self, backend: str) -> None:
        """Make a backend ready here and in its process. Seconds for a large vocabulary."""
        self._open(backend)
        self._checker.start(backend)

    def close(self) -> None:
        self._compilers.clear()
        self._checker.close()

    def _open(self, backend: str) -> GrammarCompiler:
        if backend not in self._compilers:  # those that are open do not wait for another one
            with self._opening:
                if backend not in self._compilers:
                    self._compilers[backend] = self._plugins.create_guarded(
                        STRUCTURED_OUTPUT,
                        backend,
                        tokenizer=self.tokenizer,
                        vocab_size=self._vocab_size,
                    )
        return self._compilers[backend]
