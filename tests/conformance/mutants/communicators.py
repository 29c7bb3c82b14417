"""A communicator with fused operations, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import Mutant, Specimen
from treadle.testing.communicators import CommunicatorSuite

SOURCE = """
from types import SimpleNamespace

from treadle.api import impl
from treadle.api.types import CommunicatorOffer, Refusal

TREADLE = {"communicators": ["mine"]}


class Mine:
    name = "mine"

    def __init__(self, base):
        self.base, self.memory_bytes = base, base.memory_bytes + 64
        self.rank, self.world_size = base.rank, base.world_size

    def all_reduce(self, x):
        return self.base.all_gather(x[None], 0).sum(0, dtype=x.dtype)

    def all_gather(self, x, dim=-1):
        return self.base.all_gather(x, dim)

    def all_reduce_min(self, values):
        return self.base.all_reduce_min(values)

    def set_dry_run(self, enabled):
        self.base.set_dry_run(enabled)

    def create_fused_op(self, op, size, dtype):
        from treadle_layers_kit import ops

        def fused_norm(x, residual, weight, eps, offset):
            if len(x) > 4:
                return None
            return ops.fused_add_rms_norm(self.base.all_reduce(x), residual, weight, eps, offset)

        run = {"all_reduce_add_rms_norm": fused_norm, "all_gather": self.base.all_gather}[op]
        return SimpleNamespace(run=run)


@impl
def treadle_communicator(request):
    if request.device.type != "cpu":
        return Refusal("mine", ("it is for the CPU",))
    return CommunicatorOffer("mine", 10, lambda base, device: Mine(base))
"""

SPECIMENS = (
    Specimen(
        suite=CommunicatorSuite,
        plugin="communicators:mine",
        source=SOURCE,
        mutants=(
            Mutant("test_an_answer_is_an_offer_or_says_why_not", {'("it is for the CPU",)': "()"}),
            Mutant(
                "test_ranks_keep_their_places",
                {"base.memory_bytes + 64": "base.memory_bytes - 64"},
            ),
            Mutant(
                "test_it_sums",
                {"self.base.all_gather(x[None], 0)": "x[None]"},
                also=frozenset({"test_a_dry_run_needs_no_other_rank"}),
                why="which sums once more after it",
            ),
            Mutant(
                "test_it_gathers_in_rank_order",
                {
                    "return self.base.all_gather(x, dim)": "return self.base.all_gather(x, dim).flip(dim)"
                },
            ),
            Mutant(
                "test_ranks_agree_on_the_smallest",
                {"return self.base.all_reduce_min(values)": "return list(values)"},
            ),
            Mutant(
                "test_a_dry_run_needs_no_other_rank",
                {"self.base.set_dry_run(enabled)": "self.all_gather = lambda x, dim: x"},
            ),
            Mutant(
                "test_fused_operations_equal_their_references",
                {"weight, eps, offset)\n\n": "weight, eps, offset + 1)\n\n"},
            ),
        ),
    ),
)
