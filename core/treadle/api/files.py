"""Where a checkpoint comes from and how its parts are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = (
    "ChatRenderer",
    "ModelFiles",
    "ModelRef",
    "ModelSource",
    "ParameterFiller",
    "TensorFiles",
    "TextStream",
    "Tokenizer",
    "WeightLoader",
)


@dataclass(frozen=True, slots=True)
class ModelRef:
    """What the user typed, taken apart: ``scheme:path`` and a revision.

    ``download_dir`` is where a source that downloads keeps its files (``None``: its own cache).
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
    """Brings checkpoints to the local disk."""

    def resolve(self, ref: ModelRef, *, patterns: Sequence[str]) -> ModelFiles:
        """Return the local files of ``ref`` whose names match any of the glob ``patterns``."""


class WeightLoader(Protocol):
    """Reads the tensors of one checkpoint."""

    def tensors(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(name, tensor)`` for each wanted tensor, on the CPU, in any order.

        A tensor may alias a memory-mapped file: it is read-only and may be sliced before it is
        copied, so that a rank reads only its shard.
        """


@runtime_checkable
class TensorFiles(Protocol):
    """An optional ability of a ``WeightLoader``: its errors can name a file."""

    def where(self, name: str) -> str:
        """The file that holds a tensor which ``tensors`` has yielded."""


@runtime_checkable
class ParameterFiller(Protocol):
    """An optional ability of a ``WeightLoader`` that reads no tensors: it fills the parameters."""

    def fill(self, model: nn.Module) -> None:
        """Fill every parameter of ``model`` in place, on whatever device it is."""


class TextStream(Protocol):
    """Turns a growing list of ids into text; one per sequence."""

    def step(self, token: int) -> str:
        """Return the text that ``token`` completes; ``""`` while a character is incomplete."""

    def finish(self) -> str:
        """Return what was held back, with U+FFFD for bytes that never became a character."""


class Tokenizer(Protocol):
    """Text to token ids and back. Safe to use from several threads."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that the tokenizer knows."""

    @property
    def eos_id(self) -> int | None: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def chat_template(self) -> str | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode ``text``; markers of special tokens in it become these tokens.

        That is right for a prompt, which is all of one author. Words of several authors are joined
        and encoded by a renderer, which keeps the users' markers from becoming special.
        """

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token(self, token: int) -> str:
        """The text of one id on its own, as logprobs show it."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one id stands for (grammars need the part of a character it may be)."""

    def stream(
        self,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> TextStream:
        """Start an incremental detokenisation after ``prompt_ids``."""


class ChatRenderer(Protocol):
    """Turns chat messages into a prompt."""

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
        """Encode what ``render`` returned, that very object: markers that the template wrote become
        special tokens, markers inside of messages stay text."""
