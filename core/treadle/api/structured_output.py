"""The interface of structured output backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = (
    "CompiledGrammar",
    "GrammarCompiler",
    "GrammarMatcher",
    "GrammarSpec",
    "SupportsForcedTokens",
    "SupportsGrammarBatches",
    "SupportsUnenforced",
)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """The constraint that the whole output must match.

    ``source`` is JSON text, a regex, a JSON list or a grammar. ``options`` may contain ``whitespace_pattern``, a
    regex for whitespace in JSON, and ``strict``: if it is ``False``, the backend enforces what it can and refuses
    nothing for the rest. A structural tag is in the form of xgrammar (``parse_structural_tag`` of the kit reads
    it). A regex may have anchors around it, and digits are those of ASCII, in patterns of a JSON schema letters
    too; ``plain`` of the kit ``treadle-structured-output-kit`` writes them for libraries that see it otherwise.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "ebnf", "structural_tag"]
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)


class GrammarMatcher(Protocol):
    """The state of a sequence in a grammar. Used by one thread at a time.

    It excludes stop tokens: the core allows them in the bitmask if the matcher is accepting.
    """

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        """Write the allowed next tokens to ``bitmask[row]``, every bit of it.

        The row is int32 words: bit ``i % 32`` of word ``i // 32`` is id ``i``, 1 is allowed, 0 if there is none.
        """

    def accept_token(self, token: int) -> bool:
        """Advance by a token. Return ``False``, without a change, if it is not allowed."""

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` accepted tokens."""

    @property
    def is_accepting(self) -> bool:
        """Whether the accepted text matches the grammar, so that the sequence may end."""

    @property
    def is_terminated(self) -> bool:
        """Whether it matches and no token may follow, so that the sequence must end."""


class CompiledGrammar(Protocol):
    """A compiled grammar, shared by all requests with the same spec. Thread-safe."""

    def matcher(self) -> GrammarMatcher: ...


class GrammarCompiler(Protocol):
    """Compiles grammars for a vocabulary. Thread-safe.

    The core calls it first in a process with limits on time and memory, and compiles the grammar
    in the engine process only if this succeeds. The process is a fork of one in which the compiler
    was made: what it keeps from one call to the next is lost there, and so are its threads.
    """

    name: str

    def unsupported_reason(self, spec: GrammarSpec) -> str | None:
        """Return which part of ``spec`` the backend cannot enforce, or ``None``."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile ``spec``. May raise any exception; its text is shown to the client."""


@runtime_checkable
class SupportsForcedTokens(Protocol):
    """Optional, of a ``GrammarMatcher``: knows the tokens that must follow, without a mask for each.

    On a CPU the core adds them to the sequence, and the model computes them in one step.
    """

    def forced_tokens(self) -> list[int]:
        """Return them in order, none if there is a choice. It changes nothing in the matcher.

        After those before it, each is the only one that the bitmask allows, and the matcher is not accepting.
        """


@runtime_checkable
class SupportsUnenforced(Protocol):
    """Optional, of a ``GrammarCompiler``: knows what of an accepted constraint the output need not obey."""

    def unenforced(self, spec: GrammarSpec) -> str | None:
        """Return it as a text for the client, such as formats that no standard has, or ``None``."""


@runtime_checkable
class SupportsGrammarBatches(Protocol):
    """Optional, of a ``GrammarCompiler``: advances its matchers together, in threads of its own.

    Both methods return ``None`` for a matcher that fails. The core then calls the method of that
    matcher, whose words the client gets. Used by one thread at a time.
    """

    def fill_bitmasks(
        self, matchers: Sequence[GrammarMatcher], bitmask: Tensor, rows: Sequence[int]
    ) -> list[bool | None]:
        """Fill ``bitmask[rows[i]]`` for each matcher, and return what its ``is_accepting`` is.

        ``bitmask`` is contiguous and has ``vocab_size // 32 + 1`` words in a row, so that there is room for one id
        after the vocabulary; the core ignores it. On CUDA it is in shared memory. From ``accept_tokens`` on, until
        the next call of this, a backend may write masks into the rows that its matchers had: when rows change, the
        core calls this without matchers, and then at once with those that it has now.
        """

    def accept_tokens(
        self, matchers: Sequence[GrammarMatcher], tokens: Sequence[int]
    ) -> list[bool | None]:
        """Advance each matcher by ``tokens[i]``, and return what its ``is_terminated`` is then."""
