"""The output of a chat as blocks, one after the other: a thought, a text, a call.

The Responses and the Messages API stream items that open, grow and close. ``BlockReader`` finds
them in the deltas of one output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from treadle.outputs import CompletionOutput, OutputPart, ReasoningPart, TextPart

__all__ = ("Block", "BlockEvent", "BlockReader")

Kind = Literal["reasoning", "text", "call"]
BlockEvent = tuple[Literal["open", "delta", "close"], "Block", str]
"""What happens to a block; the text is the new piece of a ``delta``."""


class Block(msgspec.Struct, kw_only=True):
    """One block. ``id`` and ``name`` are those of a call, whose text is its arguments."""

    kind: Kind
    index: int
    id: str = ""
    name: str = ""
    pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockReader:
    """Reads the deltas of one output. At most one block, the last, is open."""

    def __init__(self, *, hides_reasoning: bool = False) -> None:
        self._hides_reasoning = hides_reasoning
        self._open: Block | None = None
        self._call_index = -1
        self._count = 0

    def read(self, completion: CompletionOutput) -> Iterator[BlockEvent]:
        """Yield what a delta changes. A delta that finishes the output closes its last block."""
        parts: list[OutputPart] = completion.parts or []
        if completion.parts is None and completion.text:
            parts = [TextPart(completion.text)]
        for part in parts:
            yield from self._read_part(part)
        if completion.finish_reason is not None:
            yield from self._close()

    def _read_part(self, part: OutputPart) -> Iterator[BlockEvent]:
        if self._hides_reasoning and isinstance(part, ReasoningPart):
            return
        if isinstance(part, TextPart | ReasoningPart):
            kind: Kind = "text" if isinstance(part, TextPart) else "reasoning"
            if self._open is None or self._open.kind != kind:
                yield from self._close()
                yield self._begin(Block(kind=kind, index=self._count))
            piece = part.text
        else:
            if self._open is None or self._open.kind != "call" or part.index != self._call_index:
                yield from self._close()
                self._call_index = part.index
                yield self._begin(
                    Block(kind="call", index=self._count, id=part.id or "", name=part.name or "")
                )
            piece = part.arguments
        if piece and self._open is not None:
            self._open.pieces.append(piece)
            yield "delta", self._open, piece

    def _begin(self, block: Block) -> BlockEvent:
        self._open = block
        self._count += 1
        return "open", block, ""

    def _close(self) -> Iterator[BlockEvent]:
        block, self._open = self._open, None
        if block is not None:
            yield "close", block, ""
