"""Run the simulator for a number of steps, replay one seed, or see whether it finds planted bugs.

python tests/reliability/simulate.py --steps 1e6 --seed 7
python tests/reliability/simulate.py --replay 7
python tests/reliability/simulate.py --bugs
"""

from __future__ import annotations

import argparse
import signal
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from simulator.bugs import BUGS
from simulator.episode import Episode, simulate
from simulator.world import Violation

__all__ = ("Run", "find_bug", "replay", "run")

MAX_SEEDS = 3000
"""Episodes within which a planted bug must be found."""


@dataclass
class Run:
    """What episodes one after another have come to. ``digest`` is that of all their events."""

    num_steps: int = 0
    num_engine_steps: int = 0
    num_seeds: int = 0
    digest: int = 0
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.num_steps:,} steps, {self.num_engine_steps:,} of them of engines, "
            f"{self.num_seeds:,} seeds, {len(self.violations)} violations, digest {self.digest:08x}"
        )


def run(num_steps: int, seed: int, report_every: int = 10**6) -> Run:
    """Run the episodes of ``seed`` and those after it until there are ``num_steps``."""
    result = Run()
    while result.num_steps < num_steps:
        episode = Episode(seed + result.num_seeds, num_steps - result.num_steps)
        try:
            simulate(episode)
        except Violation as violation:
            result.violations.append(str(violation))
            print(violation, flush=True)
        before = result.num_steps
        result.num_steps += episode.world.steps
        result.num_engine_steps += episode.num_engine_steps
        result.num_seeds += 1
        result.digest = zlib.crc32(episode.world.digest.to_bytes(4), result.digest)
        if before // report_every < result.num_steps // report_every:
            print(result, flush=True)
    return result


def replay(seed: int) -> Iterable[str]:
    """Yield the events of an episode, and the violation that it ends with, if it does."""
    episode = Episode(seed)
    violation = "no violation"
    try:
        simulate(episode)
    except Violation as error:
        violation = str(error)
    yield str(episode.setup)
    yield from episode.world.events
    yield f"{violation}; digest {episode.world.digest:08x}"


def find_bug(name: str, seeds: Iterable[int]) -> tuple[int, Violation] | None:
    """Return after how many seeds a planted bug is found, and the violation."""
    with BUGS[name].planted():
        for count, seed in enumerate(seeds, start=1):
            try:
                simulate(Episode(seed))
            except Violation as violation:
                return count, violation
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=float, default=1e6, help="default: 1e6")
    parser.add_argument("--seed", type=int, default=0, help="of the first episode")
    parser.add_argument("--replay", type=int, metavar="SEED", help="print the events of one seed")
    parser.add_argument(
        "--bugs", nargs="*", choices=[*BUGS, []], metavar="BUG", help="plant these, or all"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the engine would take Control-C for its own end
    start = time.time()
    if arguments.replay is not None:
        print(*replay(arguments.replay), sep="\n")
    elif arguments.bugs is not None:
        missed = 0
        for name in arguments.bugs or BUGS:
            found = find_bug(name, range(arguments.seed, arguments.seed + MAX_SEEDS))
            missed += found is None
            if found is None:
                print(f"{name}: not found in {MAX_SEEDS} seeds", flush=True)
            else:
                print(f"{name}: found within {found[0]} seeds: {str(found[1])[:100]}", flush=True)
        raise SystemExit(missed > 0)
    else:
        result = run(int(arguments.steps), arguments.seed)
        print(f"{result}; {time.time() - start:.0f} s")
        raise SystemExit(bool(result.violations))


if __name__ == "__main__":
    main()
