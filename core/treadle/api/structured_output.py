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
    """What the output must be, from its first character to its last.

    ``source`` is JSON text, a regex, a JSON list or a grammar. ``options`` may hold
    ``whitespace_pattern``, a regex for the space between the parts of a JSON text.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "ebnf", "structural_tag"]
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)


class Matcher(Protocol):
    """The state of one sequence inside a grammar. Used by one thread at a time.

    It knows nothing of how sequences end: ids that end them belong to the model and the request,
    and the core adds them to the mask whenever the matcher is ``complete``.
    """

    def fill(self, bitmask: Tensor, row: int) -> None:
        """Write the ids that may come next into ``bitmask[row]``: int32 words, bit ``i % 32`` of
        word ``i // 32`` is id ``i``, 1 is allowed. Every bit of the row is written."""

    def accept(self, token: int) -> bool:
        """Advance; ``False`` (and no change) if the token is not allowed."""

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens that were accepted."""

    @property
    def complete(self) -> bool:
        """Whether what was accepted is a whole text of the grammar: the sequence may end here."""

    @property
    def finished(self) -> bool:
        """Whether it is complete and nothing may follow: the sequence must end here."""


class Grammar(Protocol):
    """Compiled once, shared by every request that uses the same spec. Safe in threads."""

    def matcher(self) -> Matcher: ...


class GrammarCompiler(Protocol):
    """Compiles for one vocabulary. Safe in threads.

    The core asks and compiles first in a process with limits on time and memory, and compiles again
    in the engine's own only if that went well.
    """

    name: str

    def refuses(self, spec: GrammarSpec) -> str | None:
        """Why this backend cannot enforce ``spec``, or ``None``. It names what the library would
        silently ignore."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises whatever the library raises; the text of the exception is shown to the client."""
