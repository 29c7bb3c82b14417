"""The interfaces of model sources, weight loaders, tokenizers and chat renderers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = (
    "ChatRenderer",
    "IncrementalDetokenizer",
    "ModelFiles",
    "ModelRef",
    "ModelSource",
    "SupportsFill",
    "SupportsManyTokens",
    "SupportsRevisions",
    "SupportsTensorFiles",
    "Tokenizer",
    "WeightLoader",
)


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A parsed model name: ``scheme:path`` and a revision.

    ``download_dir`` is the folder for downloads; ``None`` if the source's own cache is used.
    """

    scheme: str
    path: str
    revision: str | None = None
    download_dir: str | None = None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checkpoint on the local disk. ``config`` is the parsed ``config.json``."""

    root: Path
    names: tuple[str, ...]
    config: Mapping[str, Any]


class ModelSource(Protocol):
    """Provides checkpoints on the local disk."""

    def resolve(self, ref: ModelRef, *, patterns: Sequence[str]) -> ModelFiles:
        """Return the local files of ``ref`` with names that match any of the glob ``patterns``."""


@runtime_checkable
class SupportsRevisions(Protocol):
    """Optional protocol of a ``ModelSource`` with checkpoints that change under their names."""

    def resolve_revision(self, ref: ModelRef) -> str:
        """Return the revision that ``ref`` means now, with which it means the same files for ever."""


class WeightLoader(Protocol):
    """Reads the tensors of a checkpoint."""

    def tensors(self, should_load: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(name, tensor)`` for each tensor with ``should_load(name)``, on the CPU, in any order.

        A tensor may alias a memory-mapped file. It must not be written to, and slicing it before
        copying lets a rank read only its shard.
        """


@runtime_checkable
class SupportsTensorFiles(Protocol):
    """Optional protocol of a ``WeightLoader``: report the file of a tensor, for error messages."""

    def file_of(self, name: str) -> str:
        """Return the file of a tensor that ``tensors`` has yielded."""


@runtime_checkable
class SupportsFill(Protocol):
    """Optional protocol of a ``WeightLoader`` that reads no tensors, but fills the parameters."""

    def fill(self, model: nn.Module) -> None:
        """Fill every parameter of ``model`` in place, on its device."""


class IncrementalDetokenizer(Protocol):
    """Decodes the token ids of a sequence one by one."""

    def decode_next(self, token: int) -> str:
        """Return the text that ``token`` completes; ``""`` while a character is incomplete."""

    def flush(self) -> str:
        """Return the pending text, with U+FFFD for bytes of an incomplete character."""


@runtime_checkable
class SupportsManyTokens(Protocol):
    """An ``IncrementalDetokenizer`` that decodes many tokens faster than one by one."""

    def decode_many(self, tokens: Sequence[int]) -> str:
        """Return what ``decode_next`` would return for each of ``tokens``, joined."""


class Tokenizer(Protocol):
    """Converts text to token ids and back. Thread-safe."""

    @property
    def vocab_size(self) -> int:
        """The largest token id plus one."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    @property
    def chat_template(self) -> str | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode ``text``. Text of special tokens is encoded as special tokens.

        This suits a raw prompt, which has a single author. For messages of several authors, the
        renderer keeps markers inside messages from becoming special tokens.
        """

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, token: int) -> str:
        """Return the text of a single token, as shown in logprobs."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which may be part of a character. Used by grammars."""

    def create_detokenizer(
        self,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> IncrementalDetokenizer:
        """Return an incremental detokenizer for the tokens after ``prompt_ids``."""


class ChatRenderer(Protocol):
    """Turns chat messages into a prompt.

    Optional methods: ``start()`` is called when a server starts, ``close()`` when an engine ends.
    """

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str: ...

    def encode(self, prompt: str) -> list[int]:
        """Encode the very object that ``render`` returned.

        Markers written by the template become special tokens; markers inside messages stay text.
        """
