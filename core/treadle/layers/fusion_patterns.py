"""Where models have operations that a kernel may take the place of, and what may be fused.

Conditions are stated here once, each with the reason that the start-up report gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from treadle.api.attention import ForwardContext, SupportsExternalKVWrite
from treadle.layers import ops
from treadle.layers.attention import Attention
from treadle.layers.decoder import Decoder, DecoderLayer
from treadle.layers.int4 import PackedInt4
from treadle.layers.linear import Linear
from treadle.layers.mlp import GatedMLP
from treadle.layers.norm import RMSNorm
from treadle.layers.plain import PlainLinear
from treadle.layers.rotary import CosSin
from treadle.layers.self_attention import SelfAttention

__all__ = (
    "FUSIONS",
    "REPLACEMENTS",
    "Fusion",
    "Kernel",
    "Site",
    "defer_all_reduce",
    "linear_norm_pairs",
)

Kernel = Callable[..., Any]
M = TypeVar("M", bound=nn.Module)


class Site(NamedTuple):
    """A place in a model where a fusion applies, or ``reason`` why it does not."""

    path: str
    sizes: tuple[Mapping[str, int], ...] = ()
    """``KernelRequest.shape`` for each operation."""
    install: Callable[..., None] | None = None
    """Called with the kernel of each operation."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Fusion:
    """Operations that are used together or not at all, and where a model has them."""

    ops: tuple[str, ...]
    find: Callable[[nn.Module], Iterator[Site]]


def _modules(model: nn.Module, type_: type[M]) -> Iterator[tuple[str, M]]:
    return ((path, m) for path, m in model.named_modules() if isinstance(m, type_))


def _norms(model: nn.Module, attribute: str) -> Iterator[Site]:
    for path, norm in _modules(model, RMSNorm):
        yield Site(path, (_size(norm),), partial(setattr, norm, attribute))


def _activations(model: nn.Module) -> Iterator[Site]:
    for path, mlp in _modules(model, GatedMLP):
        if mlp.op is ops.silu_and_mul:
            size = {"size": mlp.gate_up_proj.out_features // 2}
            yield Site(path, (size,), partial(setattr, mlp, "op"))


def _linears(model: nn.Module) -> Iterator[Site]:
    for path, linear in _modules(model, Linear):
        if isinstance(linear.method, PlainLinear):
            yield Site(path, (_features(linear),), partial(setattr, linear.method, "op"))


def _int4_linears(model: nn.Module) -> Iterator[Site]:
    for path, weight in _modules(model, PackedInt4):
        sizes = {"in_features": weight.inputs, "out_features": weight.codes.shape[1]}
        yield Site(path, (sizes | {"group": weight.group},), partial(setattr, weight, "op"))


def _size(norm: RMSNorm) -> dict[str, int]:
    return {"size": norm.weight.shape[0]}


def _features(linear: Linear) -> dict[str, int]:
    return {"in_features": linear.inputs.size, "out_features": linear.out_features}


# ----------------------------------------------------------------------------------------- fusions


def _gated_projections(model: nn.Module) -> Iterator[Site]:
    """The first projection of a gated MLP with its activation."""
    for path, mlp in _modules(model, GatedMLP):
        if mlp.op is not ops.silu_and_mul:
            yield Site(path, reason="its activation is not silu")
        elif not isinstance(mlp.gate_up_proj.method, PlainLinear):
            yield Site(path, reason="gate_up_proj is quantized")
        else:
            yield Site(path, (_features(mlp.gate_up_proj),), partial(setattr, mlp, "fused"))


def _rope_writes(model: nn.Module, *, fp8: bool) -> Iterator[Site]:
    """Head norms, rotation and cache write of an attention block."""
    for path, block in _modules(model, SelfAttention):
        if block.attn.is_fp8_cache != fp8:
            continue
        if reason := _rope_obstacle(block):
            yield Site(path, reason=reason)
            continue
        request = block.attn.request
        sizes = {name: getattr(request, name) for name in ("heads", "kv_heads", "head_size")}
        yield Site(path, (sizes,), partial(_install_rope, block))


def _rope_obstacle(block: SelfAttention) -> str:
    norms, attn, rotary = (block.q_norm, block.k_norm), block.attn, block.rotary
    checks = (
        (
            norms == (None, None) or all(isinstance(norm, RMSNorm) for norm in norms),
            "queries or keys have norms other than RMSNorm",
        ),
        (not rotary.interleaved, "rotated pairs are interleaved"),
        (rotary.inv_freq.numel() == attn.request.head_size, "only a part of each head is rotated"),
        (
            isinstance(attn.backend, SupportsExternalKVWrite),
            "the attention backend writes its cache itself",
        ),
        (
            attn.is_fp8_cache or attn.cache.dtype == rotary.dtype,
            "the cache has another dtype than the model",
        ),
    )
    return next((reason for good, reason in checks if not good), "")


def _install_rope(block: SelfAttention, kernel: Callable[..., Tensor]) -> None:
    block.fused = FusedRope(block, kernel)


class FusedRope:
    """``rope_and_cache`` or ``rope_and_cache_fp8`` with the constant arguments of one block."""

    def __init__(self, block: SelfAttention, kernel: Callable[..., Tensor]) -> None:
        self._kernel = kernel
        self._norms = None
        if isinstance(block.q_norm, RMSNorm) and isinstance(block.k_norm, RMSNorm):
            q, k = block.q_norm, block.k_norm
            self._norms = (q.weight, k.weight, q.eps, q.offset)

    def __call__(
        self, qkv: Tensor, angles: CosSin, attn: Attention, forward_ctx: ForwardContext
    ) -> Tensor:
        plan = forward_ctx.attn_metadata[attn.attn_group]
        slots = attn.backend.slot_mapping(plan)  # type: ignore[attr-defined]
        cache = attn.cache.view(2, -1, *attn.cache.shape[-2:])
        scales = (attn.scales,) if attn.is_fp8_cache else ()
        return self._kernel(qkv, angles.cos, angles.sin, self._norms, cache, slots, *scales)


def has_default_forward(module: nn.Module, base: type[nn.Module], *methods: str) -> bool:
    """Return whether ``module`` is an instance of ``base`` whose class overrides neither ``forward``
    nor any of ``methods``."""
    return isinstance(module, base) and all(
        getattr(type(module), name) is getattr(base, name) for name in ("forward", *methods)
    )


class LinearNormPair(NamedTuple):
    """A linear layer whose result is read by one norm and nothing else, and that norm."""

    path: str
    linear: Linear
    norm: RMSNorm
    selects_rows: bool
    """Whether the last layer selects rows of the result before the norm."""


def linear_norm_pairs(model: nn.Module) -> Iterator[LinearNormPair | Site]:
    """Yield the pairs of every ``Decoder``, and a ``Site`` with the reason where there is none."""
    for path, decoder in _modules(model, Decoder):
        modules: list[Any] = [decoder, *decoder.layers]
        bases = [Decoder] + [DecoderLayer] * len(decoder.layers)
        methods = [()] + [("forward_attention",)] * len(decoder.layers)
        for module, base, names in zip(modules, bases, methods, strict=True):
            if not has_default_forward(module, base, *names):
                yield Site(path, reason=f"{type(module).__name__} has its own forward")
                break
        else:
            yield from _pairs(path, decoder)


def _pairs(path: str, decoder: Decoder) -> Iterator[LinearNormPair | Site]:
    layers: list[Any] = list(decoder.layers)
    norms = [layer.input_layernorm for layer in layers[1:]] + [decoder.norm]
    for index, (layer, next_norm) in enumerate(zip(layers, norms, strict=True)):
        for name, base, linear, norm in (
            ("self_attn", SelfAttention, "o_proj", layer.post_attention_layernorm),
            ("mlp", GatedMLP, "down_proj", next_norm),
        ):
            block, place = getattr(layer, name), f"{path}.layers.{index}.{name}"
            if not has_default_forward(block, base):
                reason = f"{type(block).__name__} is there, not the usual {base.__name__}"
                yield Site(place, reason=reason)
                continue
            module = getattr(block, linear)
            if has_default_forward(module, Linear) and has_default_forward(norm, RMSNorm):
                last = name == "self_attn" and layer is layers[-1]
                yield LinearNormPair(f"{place}.{linear}", module, norm, last)


def defer_all_reduce(model: nn.Module) -> None:
    """Move the sum over ranks that ends a linear layer into the norm that reads the result."""
    for pair in linear_norm_pairs(model):
        if isinstance(pair, LinearNormPair) and pair.linear.reduce_results:
            pair.linear.reduce_results, pair.norm.tp_group = False, pair.linear.tp_group


def _split_k_norms(model: nn.Module) -> Iterator[Site]:
    """Linear layers that leave their last addition to the norm that reads the result."""
    for pair in linear_norm_pairs(model):
        if isinstance(pair, Site):
            yield pair
            continue
        linear, norm = pair.linear, pair.norm
        checks = (
            (not pair.selects_rows, "the last layer selects rows before the norm"),
            (norm.tp_group is None and not linear.reduce_results, "the ranks sum before the norm"),
            (linear.bias is None, "the linear layer has a bias"),
            (isinstance(linear.method, PlainLinear), "the linear layer is quantized"),
        )
        if reason := next((reason for good, reason in checks if not good), ""):
            yield Site(pair.path, reason=reason)
        else:
            sizes = (_size(norm), _features(linear))
            yield Site(pair.path, sizes, partial(_install_split_k, norm, linear.method))


def _install_split_k(norm: RMSNorm, method: Any, add: Kernel, multiply: Kernel) -> None:
    norm.partials_op, method.op = add, multiply


REPLACEMENTS = (
    Fusion(("rms_norm",), partial(_norms, attribute="op")),
    Fusion(("fused_add_rms_norm",), partial(_norms, attribute="add_op")),
    Fusion(("silu_and_mul",), _activations),
    Fusion(("linear",), _linears),
    Fusion(("int4_linear",), _int4_linears),
)
"""Kernels in the place of one operation of one module."""

FUSIONS = (
    Fusion(("linear_silu_and_mul",), _gated_projections),
    Fusion(("rope_and_cache",), partial(_rope_writes, fp8=False)),
    Fusion(("rope_and_cache_fp8",), partial(_rope_writes, fp8=True)),
    Fusion(("fused_add_partials_rms_norm", "linear_split_k"), _split_k_norms),
)
"""Kernels for what several modules compute; later ones take precedence. Those between ranks are in
``treadle.layers.collective_ops``."""
