"""How the tiles of Hopper's kernel are divided among programs, of which none is to wait for others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

__all__ = ("StreamKSchedule", "schedule_stream_k")


@dataclass(frozen=True, slots=True)
class StreamKSchedule:
    """The first ``num_split_tiles`` tiles are divided into runs of ``chunks_per_program`` chunks, one for each program that
    gets any; each of ``num_programs`` then takes ``num_waves`` whole tiles.

    ``max_partials``: of how many shared tiles a program may have a part; 0: none is cut.
    """

    num_split_tiles: int
    chunks_per_program: int
    num_programs: int
    num_waves: int
    max_partials: int


@lru_cache(4096)
def schedule_stream_k(num_tiles: int, chunks: int, num_programs: int) -> StreamKSchedule:
    """For ``num_tiles`` of ``chunks`` each and at most so many programs: the one that is done first.

    A part costs about as much as a chunk and a half to write, and as one to read, all those of a tile
    one after another by one program.
    """
    candidates: list[tuple[float, StreamKSchedule]] = []
    remainder = num_tiles % num_programs
    for num_split_tiles in {remainder, num_tiles} if num_tiles < 2 * num_programs else {remainder}:
        num_waves = (num_tiles - num_split_tiles) // num_programs
        if num_split_tiles == 0:
            candidates.append(
                (num_waves * chunks, StreamKSchedule(0, chunks, num_programs, num_waves, 0))
            )
            continue
        split_chunks = num_split_tiles * chunks
        for chunks_per_program in range(
            -(-split_chunks // num_programs), chunks * -(-num_split_tiles // num_programs) + 1
        ):
            num_partials = _max_partials(num_split_tiles, chunks_per_program, chunks)
            max_partials = 0 if num_partials == 1 else 1 if chunks % chunks_per_program == 0 else 2
            cost = (
                num_waves * chunks
                + chunks_per_program
                + (1 + 1.5 * max_partials + num_partials if max_partials else 0)
            )
            num_used = num_programs if num_waves else -(-split_chunks // chunks_per_program)
            candidates.append(
                (
                    cost,
                    StreamKSchedule(
                        num_split_tiles, chunks_per_program, num_used, num_waves, max_partials
                    ),
                )
            )
    return min(
        candidates, key=lambda pair: (pair[0], pair[1].num_split_tiles, pair[1].chunks_per_program)
    )[1]


def _max_partials(num_split_tiles: int, chunks_per_program: int, chunks: int) -> int:
    """The most parts of a tile; where tiles begin in their shares repeats itself."""
    period = min(num_split_tiles, chunks_per_program // gcd(chunks_per_program, chunks))
    return max(
        ((t + 1) * chunks - 1) // chunks_per_program - t * chunks // chunks_per_program + 1
        for t in range(period)
    )
