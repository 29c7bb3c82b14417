"""Scales of an fp8 KV cache, computed from a model's keys and values (``calculate_kv_scales``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from treadle.api.attention import CommonAttentionMetadata
from treadle.api.communicators import Communicator
from treadle.errors import ConfigError
from treadle.runner.attention import build_metadata
from treadle_layers_kit import Attention
from treadle_worker_kit.attention import AttentionLayers
from treadle_worker_kit.stages import StartStages

__all__ = ("calculate_scales",)

TOKENS = 512
# The largest measured value is stored as a quarter of the type's maximum. Real text may have larger
# values than random tokens, and a floating-point type loses no precision by the margin.
MARGIN = 4.0


@torch.inference_mode()
def calculate_scales(
    model: nn.Module,
    attention: AttentionLayers,
    tp_group: Communicator,
    stages: StartStages,
    pages: Sequence[int],
    device: torch.device,
    vocab_size: int,
    max_len: int,
) -> None:
    """Set the scales of all layers with an fp8 cache, the same on every rank. Collective.

    Runs a prompt of random tokens through the model, writing to the cache before any sequence uses
    it. Call this before installing kernels, which may write keys without calling the attention
    layers, and before capturing CUDA graphs, which contain the scales. Raises ``ConfigError`` if no
    cache is fp8.
    """
    layers = [m for m in model.modules() if isinstance(m, Attention) and m.is_fp8_cache]
    if not layers:
        raise ConfigError(
            "calculate_kv_scales is on, but no cache is fp8; set kv_cache_dtype to fp8_e4m3 or "
            "fp8_e5m2, or do not set calculate_kv_scales"
        )
    max_abs = torch.zeros(len(layers), 2, device=device)
    rows = dict(zip(layers, max_abs, strict=True))

    def record(layer: Attention, arguments: tuple[Any, ...]) -> None:
        _, k, v, _ = arguments
        rows[layer].copy_(torch.stack([k.abs().amax(), v.abs().amax()]))

    batch = _prompt(attention.page_size or 0, pages, device, max_len)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (batch.max_seq_len,), generator=generator).to(device)
    positions = torch.arange(batch.max_seq_len, device=device)
    forward_ctx = build_metadata(attention.attention_groups, [batch] * len(attention.cache_groups))
    with stages.dry_run() as compiles:
        if compiles:
            model.forward(ids, positions, forward_ctx)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    try:
        model.forward(ids, positions, forward_ctx)
    finally:
        for handle in hooks:
            handle.remove()
    gathered = tp_group.all_gather(max_abs, dim=0).view(tp_group.world_size, len(layers), 2)
    for layer, (key, value) in zip(layers, gathered.amax(dim=0).tolist(), strict=True):
        limit = torch.finfo(layer.cache.dtype).max
        layer.scales = (_scale(key, limit), _scale(value, limit))


def _scale(max_abs: float, limit: float) -> float:
    """Return the scale for the largest value; 1 if it is zero or not finite."""
    scale = MARGIN * max_abs / limit
    return scale if 0.0 < scale < float("inf") else 1.0


def _prompt(
    size: int, pages: Sequence[int], device: torch.device, max_len: int
) -> CommonAttentionMetadata:
    """Return a batch of one prompt, of at most ``TOKENS`` tokens, in the pages from 1 on."""
    length = min(TOKENS, max_len, (min(pages) - 1) * size)
    count = -(-length // size)
    return CommonAttentionMetadata(
        page_size=size,
        num_decodes=int(length == 1),
        max_query_len=length,
        max_seq_len=length,
        query_start_loc=torch.tensor([0, length], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
        page_table=torch.arange(1, count + 1, dtype=torch.int32, device=device).view(1, count),
        slot_mapping=torch.arange(size, size + length, device=device),
        query_lens_cpu=[length],
        seq_lens_cpu=[length],
    )
