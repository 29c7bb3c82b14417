"""A kernel for one operation, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import Mutant, Specimen
from weft.testing.kernels import KernelSuite

SOURCE = """
from weft.api import impl
from weft.api.types import KernelOffer, Refusal

WEFT = {"kernels": ["mine"]}


def load():
    import torch.nn.functional as F

    return lambda x, weight, eps, offset: F.rms_norm(x, weight.shape, weight, eps)


@impl
def weft_kernel(op, request):
    if op != "rms_norm":
        return None
    if request.device.kind != "cpu":
        return Refusal("mine", ("it is for the CPU",))
    return KernelOffer("mine", 10, load)
"""

SPECIMENS = (
    Specimen(
        suite=KernelSuite,
        plugin="kernels:mine",
        source=SOURCE,
        mutants=(
            Mutant(
                "test_a_bid_is_an_offer_or_says_why_not",
                {
                    "    if request.device.kind": "    {'cpu': 0, 'cuda': 1}[request.device.kind]\n    if request.device.kind"
                },
            ),
            Mutant("test_a_bid_is_an_offer_or_says_why_not", {'("it is for the CPU",)': "()"}),
            Mutant(
                "test_an_unknown_operation_is_nobodys",
                {
                    'if op != "rms_norm"': 'if op in ("add_rms_norm", "silu_mul", "linear", "silu_linear", "likeliest", "rotary_write", "rotary_write_fp8", "sample")'
                },
            ),
            Mutant("test_it_computes_what_the_layers_do", {"weight, eps)": "weight, eps) * 1.01"}),
            Mutant(
                "test_rows_may_lie_apart", {"F.rms_norm(x,": "F.rms_norm(x.view(-1).view(x.shape),"}
            ),
            Mutant(
                "test_arguments_are_left_as_they_are",
                {
                    "F.rms_norm(x, weight.shape, weight, eps)": "x.copy_(F.rms_norm(x, weight.shape, weight, eps))"
                },
            ),
        ),
    ),
)
