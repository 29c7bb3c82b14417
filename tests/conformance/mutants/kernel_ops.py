"""A kernel for one operation, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import Mutant, Specimen
from treadle.testing.kernels import KernelSuite

SOURCE = """
from treadle.api import impl
from treadle.api.types import KernelOffer, Refusal

TREADLE = {"kernel_ops": ["mine"]}


def load():
    import torch.nn.functional as F

    return lambda x, weight, eps, offset: F.rms_norm(x, weight.shape, weight, eps)


@impl
def treadle_kernel_op(op, request):
    if op != "rms_norm":
        return None
    if request.device.type != "cpu":
        return Refusal("mine", ("it is for the CPU",))
    return KernelOffer("mine", 10, load)
"""

ROTARY = """
from treadle.api import impl
from treadle.api.types import KernelOffer

TREADLE = {"kernel_ops": ["rotary"]}


def load():
    import torch
    from treadle_layers_kit import ops

    def write(qkv, cos, sin, norms, cache, slots):
        size, kv_heads = cos.shape[-1], cache.shape[2]
        q, k, v = qkv.unflatten(1, (-1, size)).tensor_split([-2 * kv_heads, -kv_heads], 1)
        if norms is not None:
            q, k = ops.rms_norm(q, norms[0], norms[2]), ops.rms_norm(k, norms[1], norms[2])
        q, k = ops.rotary(q, k, cos, sin)
        kept = slots >= 0
        cache[:, slots[kept]] = torch.stack((k, v))[:, kept]
        return q

    return write


@impl
def treadle_kernel_op(op, request):
    return KernelOffer("rotary", 10, load) if op == "rope_and_cache" else None
"""

PARTS = """
from treadle.api import impl
from treadle.api.types import KernelOffer

TREADLE = {"kernel_ops": ["parts"]}


def multiplies():
    import torch
    import torch.nn.functional as F

    def multiply(x, weight, bias):
        if bias is not None or len(x) > 64:
            return F.linear(x, weight, bias)
        pieces = zip(x.float().tensor_split(2, 1), weight.float().tensor_split(2, 1))
        return torch.stack([F.linear(*piece) for piece in pieces])

    return multiply


def adds():
    from treadle_layers_kit import ops

    def add(parts, residual, weight, eps, offset):
        total = parts.sum(0).to(residual.dtype)
        return ops.fused_add_rms_norm(total, residual, weight, eps, offset)

    return add


@impl
def treadle_kernel_op(op, request):
    known = {"linear_split_k": multiplies, "fused_add_partials_rms_norm": adds}
    return KernelOffer("parts", 10, known[op]) if op in known else None
"""

SPECIMENS = (
    Specimen(
        suite=KernelSuite,
        plugin="kernel_ops:parts",
        source=PARTS,
        mutants=[
            Mutant("test_it_computes_what_the_reference_does", {old: new})
            for old, new in (
                ("bias is not None or len(x)", "len(x)"),
                ("return torch.stack(", "return 1.1 * torch.stack("),
                ("for piece in pieces])", "for piece in pieces]).to(x.dtype)"),
            )
        ]
        + [
            Mutant("test_it_computes_what_the_reference_does", {old: new})
            for old, new in (
                ("parts.sum(0)", "parts.mean(0)"),
                ("eps, offset)\n\n    return add", "eps, offset + 1)\n\n    return add"),
            )
        ],
    ),
    Specimen(
        suite=KernelSuite,
        plugin="kernel_ops:rotary",
        source=ROTARY,
        mutants=[
            Mutant("test_it_computes_what_the_reference_does", edits)
            for edits in (
                {"kept = slots >= 0": "kept = slots < 99"},
                {"norms[1]": "norms[0]"},
                {"torch.stack((k, v))": "torch.stack((v, k))"},
                {"return q\n": "return k\n"},
            )
        ],
    ),
    Specimen(
        suite=KernelSuite,
        plugin="kernel_ops:mine",
        source=SOURCE,
        mutants=(
            Mutant(
                "test_an_answer_is_an_offer_or_says_why_not",
                {
                    "    if request.device.type": "    {'cpu': 0, 'cuda': 1}[request.device.type]\n    if request.device.type"
                },
            ),
            Mutant("test_an_answer_is_an_offer_or_says_why_not", {'("it is for the CPU",)': "()"}),
            Mutant(
                "test_an_unknown_operation_is_nobodys",
                {
                    'if op != "rms_norm"': 'if op in ("fused_add_rms_norm", "silu_and_mul", "linear", "linear_silu_and_mul", "argmax", "apply_bitmask", "rope_and_cache", "rope_and_cache_fp8", "sample", "int4_linear", "int4_linear_silu_and_mul", "packed_linear", "packed_linear_silu_and_mul", "packed_experts", "fused_experts", "reorder_experts", "linear_split_k", "fused_add_partials_rms_norm")'
                },
            ),
            Mutant(
                "test_it_computes_what_the_reference_does", {"weight, eps)": "weight, eps) * 1.01"}
            ),
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
