"""How the tiles of Hopper's kernel are divided among programs, of which none is to wait for others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

__all__ = ("StreamKSchedule", "schedule_stream_k")


@dataclass(frozen=True, slots=True)
class StreamKSchedule:
    """The first ``num_split_tiles`` tiles are divided into runs of ``chunks_per_program`` chunks, one for each program that
    gets any; each of ``programs`` then takes ``num_waves`` whole tiles.

    ``max_partials``: of how many shared tiles a program may have a part; 0: none is cut.
    """

    num_split_tiles: int
    chunks_per_program: int
    programs: int
    num_waves: int
    max_partials: int


@lru_cache(4096)
def schedule_stream_k(tiles: int, chunks: int, programs: int) -> StreamKSchedule:
    """For ``tiles`` of ``chunks`` each and at most so many programs: the one that is done first.

    A part costs about as much as a chunk and a half to write, and as one to read, all those of a tile
    one after another by one program.
    """
    found: list[tuple[float, StreamKSchedule]] = []
    rest = tiles % programs
    for shared in {rest, tiles} if tiles < 2 * programs else {rest}:
        rounds = (tiles - shared) // programs
        if shared == 0:
            found.append((rounds * chunks, StreamKSchedule(0, chunks, programs, rounds, 0)))
            continue
        units = shared * chunks
        for share in range(-(-units // programs), chunks * -(-shared // programs) + 1):
            parts = _parts(shared, share, chunks)
            slots = 0 if parts == 1 else 1 if chunks % share == 0 else 2
            taken = rounds * chunks + share + (1 + 1.5 * slots + parts if slots else 0)
            count = programs if rounds else -(-units // share)
            found.append((taken, StreamKSchedule(shared, share, count, rounds, slots)))
    return min(
        found, key=lambda each: (each[0], each[1].num_split_tiles, each[1].chunks_per_program)
    )[1]


def _parts(shared: int, share: int, chunks: int) -> int:
    """The most parts of a tile; where tiles begin in their shares repeats itself."""
    some = min(shared, share // gcd(share, chunks))
    return max(((t + 1) * chunks - 1) // share - t * chunks // share + 1 for t in range(some))
