"""Grammar backends in their process: all rows of a step come in one message, and their masks go back.

A backend that advances many sequences together does so here too. Any other is asked for one after
another, which costs no message for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from treadle.api.contracts import implements
from treadle.api.types import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarMatcher,
    GrammarSpec,
    SupportsGrammarBatches,
    SupportsUnenforced,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("OBJECTS",)


class HeldCompiler:
    """A ``GrammarCompiler`` whose batches name matchers by the numbers that they have in ``objects``."""

    def __init__(self, compiler: GrammarCompiler, objects: Mapping[int, Any]) -> None:
        self._compiler, self._objects = compiler, objects
        together = implements(compiler, SupportsGrammarBatches)
        self._batches = cast(SupportsGrammarBatches, compiler) if together else None

    @property
    def name(self) -> str:
        return self._compiler.name

    def unsupported_reason(self, spec: GrammarSpec) -> str | None:
        return self._compiler.unsupported_reason(spec)

    def unenforced(self, spec: GrammarSpec) -> str | None:
        return cast(SupportsUnenforced, self._compiler).unenforced(spec)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        return self._compiler.compile(spec)

    def fill_bitmasks(
        self, numbers: Sequence[int], num_words: int, vocab_words: int
    ) -> tuple[bytes, Any]:
        """Return the masks of matchers, of ``num_words`` each, and what the backend returns."""
        import torch  # not above: parsers need none

        bitmask = torch.zeros((len(numbers), num_words), dtype=torch.int32)
        matchers = self._matchers(numbers)
        if self._batches is not None:
            rows = list(range(len(numbers)))
            results: Any = self._batches.fill_bitmasks(matchers, bitmask, rows)
        else:
            lines = bitmask[:, :vocab_words].split(1)
            results = [_fill(*row) for row in zip(matchers, lines, strict=True)]
        return bitmask.numpy().tobytes(), results

    def accept_tokens(self, numbers: Sequence[int], tokens: Sequence[int]) -> Any:
        """Return what the backend returns."""
        matchers = self._matchers(numbers)
        if self._batches is not None:
            return self._batches.accept_tokens(matchers, tokens)
        return [_accept(*row) for row in zip(matchers, tokens, strict=True)]

    def _matchers(self, numbers: Sequence[int]) -> list[GrammarMatcher]:
        return [self._objects[number].matcher for number in numbers]


class HeldMatcher:
    """A ``GrammarMatcher`` that returns its mask."""

    def __init__(self, matcher: GrammarMatcher, _: Mapping[int, Any]) -> None:
        self.matcher = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)

    def fill_bitmask(self, num_words: int) -> bytes:
        import torch

        bitmask = torch.zeros((1, num_words), dtype=torch.int32)
        self.matcher.fill_bitmask(bitmask, 0)
        return bitmask.numpy().tobytes()


def _fill(matcher: GrammarMatcher, line: Tensor) -> bool | None:
    """Fill the one row of ``line`` and return whether the matcher is accepting; ``None`` if it fails,
    of which the core hears when it asks for this row alone."""
    try:
        matcher.fill_bitmask(line, 0)
        return bool(matcher.is_accepting)
    except BaseException:
        return None


def _accept(matcher: GrammarMatcher, token: int) -> bool | None:
    """Advance a matcher and return whether it is terminated; ``None``, without a change, if it fails."""
    try:
        if matcher.accept_token(token) is not True:
            return None
    except BaseException:
        return None
    try:
        return bool(matcher.is_terminated)
    except BaseException:
        matcher.rollback(1)
        return None


OBJECTS: Mapping[str, Callable[[Any, Mapping[int, Any]], Any]] = MappingProxyType(
    {GrammarCompiler.__name__: HeldCompiler, GrammarMatcher.__name__: HeldMatcher}
)
"""What stands for an object in its process, by its protocol, where messages need another form."""
