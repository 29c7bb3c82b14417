"""Where kernels of plugins take the place of the layers' own operations.

The operations that are bid for (``treadle_kernel``), each with the sizes in ``KernelRequest.shape`` and
what ``KernelOffer.load`` must return. Tensors are in the model's dtype and contiguous in the last
dimension unless it says otherwise.

``rms_norm`` (size)
    ``f(x, weight, eps, offset) -> y`` for ``x [..., size]``; see ``ops.rms_norm``.
``fused_add_rms_norm`` (size)
    ``f(x, residual, weight, eps, offset) -> (y, residual)``; may overwrite its arguments.
``fused_add_partials_rms_norm`` (size)
    ``f(parts, residual, weight, eps, offset) -> (y, residual)``: ``fused_add_rms_norm`` of the sum of ``parts``,
    contiguous float32 ``[parts, rows, size]``, which is rounded to the dtype first. ``residual [rows,
    size]`` is contiguous and may be overwritten.
``silu_and_mul`` (size)
    ``f(x) -> y`` for ``x [..., 2 · size]``; see ``ops.silu_and_mul``.
``rope_and_cache`` (heads, kv_heads, head_size)
    ``f(qkv, cos, sin, norms, cache, slots) -> q``. ``qkv [tokens, (heads + 2 · kv_heads) ·
    head_size]``; ``cos`` and ``sin`` ``[tokens, 1, head_size]`` as in ``ops.rotate``, not
    interleaved; ``norms`` is ``None`` or ``(q_weight, k_weight, eps, offset)``. Writes keys and
    values of token ``t`` to ``cache[0]`` and ``cache[1]`` (``[pages · page_size, kv_heads,
    head_size]``) at ``slots[t]``, returns ``q [tokens, heads, head_size]``.
``rope_and_cache_fp8`` (heads, kv_heads, head_size)
    ``f(qkv, cos, sin, norms, cache, slots, scales) -> q``: the same for a cache in fp8, which gets
    keys divided by ``scales[0]`` and values by ``scales[1]`` (floats), cut off at its largest number.
``linear`` (in_features, out_features)
    ``f(x, weight, bias) -> y`` for any number of rows; see ``torch.nn.functional.linear``.
``linear_split_k`` (in_features, out_features)
    ``linear`` for a result that goes to ``fused_add_partials_rms_norm`` or ``fused_add_rms_norm`` alone: ``y``, or for
    ``x [rows, in_features]`` without a bias float32 ``[parts, rows, out_features]``, whose sum ``y`` is
    before it is rounded. Used where both operations are offered.
``linear_silu_and_mul`` (in_features, out_features)
    ``silu_and_mul`` of ``linear``: ``f(x, weight, bias) -> y`` with ``y [..., out_features / 2]``.
``int4_linear`` (in_features, out_features, group)
    ``f(x, codes, steps, inputs, group) -> y`` for any number of rows: the linear layer of a weight in
    four bits; ``inputs`` is ``in_features``, of which each ``group``, a multiple of 32 that divides them,
    share a step. ``codes`` int16 ``[chunks, out_features, 32]``: word ``i`` of a chunk of 128 inputs has
    the codes of its inputs ``i``, ``32 + i``, ``64 + i`` and ``96 + i``, from the lowest bits on; inputs
    beyond the last are zeros. ``steps`` int32 ``[in_features / group, out_features]``: above, the scale
    in float16; below, ``-(bias + zero)`` in the dtype, ``bias`` being 128 for bfloat16 and 1024 for
    float16. A weight is ``(code - zero) · scale``; see ``treadle.layers.int4.packing``. Both tensors are
    contiguous. Not for float32.

Between the ranks of one host, over memory that all of them can write to (``treadle.api.models.Shared``):
``places`` int64 ``[ranks]`` has the address of each rank's, a multiple of 16, of 3 · ``ranks`` · ``limit``
bytes; ``counts`` int32, one for each program, is the rank's own, and the programs share ``limit`` evenly. All
are zeros at first, and nobody else touches them. What is too large for the memory goes through it in turns.
The operations must be capturable, and the ranks may be a call apart.

``all_reduce`` (ranks)
    ``f(x, places, counts, rank) -> y``: the sum of ``x`` over the ranks, alike on all of them; ``x`` is
    contiguous, of bfloat16 or float32 whatever the request says; a program has 4096 bytes.
``all_reduce_add_rms_norm`` (ranks, size)
    ``f(x, residual, weight, eps, offset, places, counts, rank) -> (y, residual)``: ``fused_add_rms_norm`` of
    the sum of ``x`` over the ranks, which is rounded to the dtype first. ``x`` and ``residual`` are
    contiguous; a program has the power of two that holds a row. May overwrite ``residual``.
``all_gather`` (ranks)
    ``f(x, places, counts, rank, limit) -> y`` for ``x [rows, n]`` to ``[rows, ranks · n]``: the ranks'
    ``x`` side by side in their order; a program has 8192 bytes.

Those of the sampler (``treadle.sampling.kernels``), in the dtype of the logits:

``sample`` (vocab_size)
    ``f(logits, width, temperature, greedy, offsets, strides, positions, mixed) -> (tokens, bad)``:
    ``sampling.draw`` of ``softmax(logits / temperature)`` in blocks of ``width`` tokens with the
    numbers of ``sampling.noise``; where ``mixed``, the likeliest token in rows that are ``greedy``.
    ``logits [rows, vocab_size]`` is kept; ``temperature`` float32, ``greedy`` int32 and
    ``positions`` int64 are ``[rows]``; ``offsets`` and ``strides`` int64 ``[rows, 2]``, their rows
    equally far apart. ``tokens`` is int64, ``bad`` bool. The order of float32 sums is free.
``argmax`` (vocab_size)
    ``f(logits) -> (tokens, bad)``; see ``sampling.draw``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from treadle.api.attention import KernelOffer, KernelRequest, PagedWriter, Step
from treadle.api.cache import DeviceInfo
from treadle.layers import ops
from treadle.layers.attention import Attention
from treadle.layers.collective_ops import install_between
from treadle.layers.decoder import Decoder
from treadle.layers.int4 import PackedInt4
from treadle.layers.linear import Linear
from treadle.layers.mlp import GatedMLP
from treadle.layers.norm import RMSNorm
from treadle.layers.plain import PlainLinear
from treadle.layers.rotary import Angles
from treadle.layers.self_attention import SelfAttention

__all__ = ("Kernels", "install_kernels")


class Kernels(Protocol):
    """The part of the plugin host that is used here."""

    def kernel(self, op: str, request: KernelRequest) -> KernelOffer | None: ...


def install_kernels(
    model: nn.Module, host: Kernels, device: DeviceInfo, dtype: str
) -> dict[str, str]:
    """Give every layer the best kernel that is offered for it, once the cache is allocated.

    Returns which backend serves which operation. A layer without an offer keeps its own operation.
    """
    loaded: dict[tuple[str, tuple[tuple[str, int], ...]], Callable[..., Any] | None] = {}
    serving: dict[str, str] = {}

    def best(op: str, **shape: int) -> Callable[..., Any] | None:
        key = (op, tuple(sorted(shape.items())))
        if key not in loaded:
            offer = host.kernel(op, KernelRequest(device, dtype, shape))
            loaded[key] = offer.load() if offer is not None else None
            if offer is not None:
                serving[op] = offer.name
        return loaded[key]

    for module in model.modules():
        if isinstance(module, GatedMLP) and module.op is ops.silu_and_mul:
            projection = module.gate_up_proj
            if isinstance(projection.method, PlainLinear):
                module.fused = best("linear_silu_and_mul", **_sizes(projection))
        for holder, name, op, shape in _places(module):
            kernel = best(op, **shape)
            if kernel is not None:
                setattr(holder, name, kernel)
        if isinstance(module, SelfAttention) and _fits(module):
            request = module.attn.request
            kernel = best(
                "rope_and_cache_fp8" if module.attn.narrow else "rope_and_cache",
                heads=request.heads,
                kv_heads=request.kv_heads,
                head_size=request.head_size,
            )
            if kernel is not None:
                module.fused = FusedRotary(module, kernel)
    _install_parts(model, best)
    return serving | install_between(model, host, device, dtype)


def _places(module: nn.Module) -> Iterator[tuple[Any, str, str, dict[str, int]]]:
    """``(holder, attribute, operation, shape)`` of what one module computes itself."""
    if isinstance(module, RMSNorm):
        size = {"size": module.weight.shape[0]}
        yield module, "op", "rms_norm", size
        yield module, "add_op", "fused_add_rms_norm", size
    elif isinstance(module, GatedMLP) and module.op is ops.silu_and_mul:
        yield module, "op", "silu_and_mul", {"size": module.gate_up_proj.out_features // 2}
    elif isinstance(module, Linear) and isinstance(module.method, PlainLinear):
        yield module.method, "op", "linear", _sizes(module)
    elif isinstance(module, PackedInt4):
        sizes = {"in_features": module.inputs, "out_features": module.codes.shape[1]}
        yield module, "op", "int4_linear", {**sizes, "group": module.group}


def _install_parts(model: nn.Module, best: Callable[..., Callable[..., Any] | None]) -> None:
    """Let linear layers give their results to norms in parts, where kernels do both."""
    decoders = [module for module in model.modules() if isinstance(module, Decoder)]
    for linear, norm in (pair for decoder in decoders for pair in decoder.pairs):
        alone = norm.ranks is None and not linear.reduces and linear.bias is None
        if not alone or not isinstance(linear.method, PlainLinear):
            continue
        adds = best("fused_add_partials_rms_norm", size=norm.weight.shape[0])
        multiplies = best("linear_split_k", **_sizes(linear)) if adds is not None else None
        if multiplies is not None:
            norm.parts_op, linear.method.op = adds, multiplies


def _sizes(linear: Linear) -> dict[str, int]:
    return {"in_features": linear.inputs.size, "out_features": linear.out_features}


def _fits(module: SelfAttention) -> bool:
    """Whether norms, rotation and cache write of a block are of the usual form."""
    norms = (module.q_norm, module.k_norm)
    usual = all(isinstance(norm, RMSNorm) for norm in norms) or norms == (None, None)
    attn, rotary = module.attn, module.rotary
    return (
        usual
        and not rotary.interleaved
        and rotary.turns.numel() == attn.request.head_size
        and isinstance(attn.backend, PagedWriter)
        and (attn.narrow or attn.cache.dtype == rotary.dtype)
    )


class FusedRotary:
    """The operation ``rope_and_cache`` or ``rope_and_cache_fp8`` with what one attention block knows."""

    def __init__(self, module: SelfAttention, kernel: Callable[..., Tensor]) -> None:
        self._kernel = kernel
        self._norms = None
        if isinstance(module.q_norm, RMSNorm) and isinstance(module.k_norm, RMSNorm):
            q, k = module.q_norm, module.k_norm
            self._norms = (q.weight, k.weight, q.eps, q.offset)

    def __call__(self, qkv: Tensor, angles: Angles, attn: Attention, step: Step) -> Tensor:
        plan = step.plans[attn.group]
        slots = attn.backend.slots(plan)  # type: ignore[attr-defined]
        cache = attn.cache.view(2, -1, *attn.cache.shape[-2:])
        scales = (attn.scales,) if attn.narrow else ()
        return self._kernel(qkv, angles.cos, angles.sin, self._norms, cache, slots, *scales)
