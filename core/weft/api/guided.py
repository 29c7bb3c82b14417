"""The contract of guided decoding: a grammar is compiled once and masks each step's logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("Grammar", "GrammarCompiler", "GrammarSpec", "Matcher")


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the output must be. ``source`` is JSON text, a regex, a JSON list or a grammar."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "ebnf", "structural_tag"]
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)


class Matcher(Protocol):
    """The state of one sequence inside a grammar."""

    def fill(self, bitmask: Tensor, row: int) -> None:
        """Write the allowed ids into ``bitmask[row]``: int32 words, bit ``i % 32`` of word
        ``i // 32`` is id ``i``, 1 is allowed."""

    def accept(self, token: int) -> bool:
        """Advance; ``False`` (and no change) if the token is not allowed."""

    def rollback(self, count: int) -> None: ...

    @property
    def finished(self) -> bool: ...


class Grammar(Protocol):
    """Compiled once, shared by every request that uses the same spec."""

    def matcher(self) -> Matcher: ...


class GrammarCompiler(Protocol):
    """Compiles for one vocabulary."""

    name: str

    def refuses(self, spec: GrammarSpec) -> str | None:
        """Why this backend cannot enforce ``spec``, or ``None``."""

    def compile(self, spec: GrammarSpec) -> Grammar: ...
