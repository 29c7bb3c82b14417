"""Paged attention with torch's own operations: the reference, and the fast path on a CPU.

Measurements behind the design (one core, torch 2.13, 16 query heads, 8 KV heads, head size 128):

* For one bfloat16 query, ``scaled_dot_product_attention`` with ``enable_gqa`` is 5 to 12 times
  slower than with the GQA group folded into the query length. Its bfloat16 prefill reaches a
  third of the rate of plain matrix products.
* A gather of (token, head) rows into ``[unit, token, size]`` is as fast as one of pages, and the
  products after it need no copy. Page faults of new large tensors would cost more than the
  gather, so the buffers are reused.
* bfloat16 products round to bfloat16, which is too coarse for scores. See ``_scores``.

In float32 on a CPU, a row's result does not depend on the rest of the batch: a decode row has its
own units, padded by its own length, and a prompt is computed alone. Results are bitwise equal if
the batched product treats all units the same (oneMKL and oneDNN do with one thread), else equal up
to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from treadle.api.attention import AttentionRequest, CommonAttentionMetadata, MaskKind
from treadle.api.cache import KVCacheSpec
from treadle_paged_attention_kit.cache import DTYPES, is_fp8, write_kv
from treadle_sdpa.metadata import DecodeBatch, PrefillRow, SdpaMetadata, bias, make_plan

__all__ = ("SdpaAttention",)

_UNIT_BYTES = 1 << 20  # keys gathered at a time: about the size of a core's L2 cache
_SCORE_BYTES = 8 << 20  # float32 scores at a time


class SdpaAttention:
    """The SDPA backend of one ``AttentionRequest``. Not thread-safe: calls reuse its buffers."""

    def __init__(self, request: AttentionRequest) -> None:
        self.num_kv_heads = request.num_kv_heads
        self.gqa_group = request.num_heads // request.num_kv_heads
        self.head_size = request.head_size
        self.scale = request.scale
        self.softcap = request.softcap
        self.window = request.window
        self.causal = request.mask is not MaskKind.BIDIRECTIONAL
        self.has_sinks = request.sinks
        self.sinks: Tensor | None = None  # of the layer that runs, float32 [kv_heads, group, 1]
        self.cpu = request.device.type == "cpu"
        dtype = DTYPES[request.dtype]
        # CPUs without fp16 instructions multiply fp16 15 times slower than float32, and CPUs
        # without bfloat16 instructions emulate them.
        fast = dtype == torch.bfloat16 and self.cpu and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.compute = torch.float32 if self.cpu and not fast else dtype
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def kv_cache_shape(self, pages: int, page_size: int, spec: KVCacheSpec) -> tuple[int, ...]:
        return (2, pages, page_size, spec.num_kv_heads, spec.head_size)

    def build_metadata(self, batch: CommonAttentionMetadata) -> SdpaMetadata:
        return make_plan(batch, self.num_kv_heads, self.window)

    def slot_mapping(self, plan: SdpaMetadata) -> Tensor:
        return plan.slot_mapping

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: Tensor,
        metadata: SdpaMetadata,
        scales: tuple[float, float] = (1.0, 1.0),
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self.sinks = None if sinks is None else sinks.view(self.num_kv_heads, self.gqa_group, 1)
        if k is not None and v is not None:
            write_kv(cache, k, v, metadata.slot_mapping, scales)
        if scales == (1.0, 1.0):
            return self._attend(q, k, v, cache, metadata)
        # Scores are linear in the queries, and outputs in the values, so scale those instead of
        # the cache. Rounding the scaled queries is negligible compared with rounding to fp8.
        return self._attend(q * scales[0], k, v, cache, metadata).mul_(scales[1])

    def _attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, cache: Tensor, plan: SdpaMetadata
    ) -> Tensor:
        if len(plan.decodes) == 1 and not plan.prompts:
            return self._decode(q, cache, plan.decodes[0])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for decodes in plan.decodes:
            out[decodes.rows] = self._decode(q[decodes.rows], cache, decodes)
        for prompt in plan.prompts:
            self._prompt(q, k, v, cache, prompt, plan.page_size, out)
        return out

    # -- one new token per row

    def _decode(self, q: Tensor, cache: Tensor, rows: DecodeBatch) -> Tensor:
        num_heads, dtype = rows.count * self.num_kv_heads, q.dtype
        q = q.reshape(num_heads, self.gqa_group, self.head_size).to(self.compute)
        if not self.cpu and self.softcap is None and not self.has_sinks:
            return self._fused_decode(q, cache, rows).reshape(rows.count, -1, self.head_size)
        step = (
            max(1, _UNIT_BYTES // (rows.padded_kv_len * self.head_size * self.compute.itemsize))
            if self.cpu
            else num_heads
        )
        if step >= num_heads:
            out = self._decode_units(
                q, cache, rows.index, rows.attention_bias, rows.padded_kv_len, 0
            )
        else:
            out = torch.empty_like(q)
            for start in range(0, num_heads, step):
                end = min(start + step, num_heads)
                index = rows.index[start * rows.padded_kv_len : end * rows.padded_kv_len]
                mask = None if rows.attention_bias is None else rows.attention_bias[start:end]
                out[start:end] = self._decode_units(
                    q[start:end], cache, index, mask, rows.padded_kv_len, start
                )
        return out.view(rows.count, -1, self.head_size).to(dtype)

    def _decode_units(
        self, q: Tensor, cache: Tensor, index: Tensor, mask: Tensor | None, width: int, first: int
    ) -> Tensor:
        """Attend for units, of which ``first`` is the number of the first in the step."""
        shape = (len(q), width, self.head_size)
        keys = self._gather(cache[0], index, "k").view(shape)
        scores = self._scores(q, keys, mask)
        values = self._gather(cache[1], index, "v").view(shape)
        sinks = self.sinks
        if sinks is not None:
            units = torch.arange(first, first + len(q), device=q.device) % self.num_kv_heads
            sinks = sinks.index_select(0, units)
        return torch.bmm(_softmax(scores, sinks).to(values.dtype), values)

    def _fused_decode(self, q: Tensor, cache: Tensor, rows: DecodeBatch) -> Tensor:
        shape = (rows.count, self.num_kv_heads, rows.padded_kv_len, self.head_size)
        keys = self._gather(cache[0], rows.index, "k").view(shape)
        values = self._gather(cache[1], rows.index, "v").view(shape)
        mask = None
        if rows.attention_bias is not None:
            mask = rows.attention_bias.view(
                rows.count, self.num_kv_heads, 1, rows.padded_kv_len
            ).to(q.dtype)
            mask = mask.expand(-1, -1, self.gqa_group, -1)
        q = q.view(rows.count, self.num_kv_heads, self.gqa_group, self.head_size)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self.scale)

    # -- several new tokens in one row

    def _prompt(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: Tensor,
        row: PrefillRow,
        page_size: int,
        out: Tensor,
    ) -> None:
        tokens = slice(row.start, row.start + row.length)
        q, out = q[tokens], out[tokens]
        cached = row.total - row.length
        # A chunked prefill reads keys rounded to the cache's type. Read the cache here too, so
        # that the result does not depend on how the prompt is split into chunks.
        if k is not None and v is not None and not cached and cache.dtype == q.dtype:
            keys, values, first = k[tokens].transpose(0, 1), v[tokens].transpose(0, 1), 0
        else:
            keys, values, first = self._load(cache, row, page_size)
        is_causal_only = (
            self.softcap is None
            and not self.has_sinks
            and not cached
            and (self.window is None or self.window >= row.total)
        )
        if is_causal_only and (not self.cpu or self.compute == torch.float32):
            self._fused_prompt(q, keys, values, out)
            return
        keys, values = self._contiguous(keys), self._contiguous(values)
        if self.causal:
            block = max(16, _SCORE_BYTES // (4 * row.total * self.num_kv_heads * self.gqa_group))
        else:
            block = row.length
        for start in range(0, row.length, block):
            end = min(start + block, row.length)
            self._prompt_block(q[start:end], keys, values, out[start:end], cached + start, first)

    def _prompt_block(
        self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, cached: int, first: int
    ) -> None:
        length = len(q)
        end_key = cached + length if self.causal else first + keys.shape[1]
        first_key = first if self.window is None else max(first, cached - self.window + 1)
        keys, values = (
            keys[:, first_key - first : end_key - first],
            values[:, first_key - first : end_key - first],
        )
        # [length, kv_heads, group, size] -> [kv_heads, group * length, size]
        split = q.view(length, self.num_kv_heads, self.gqa_group, self.head_size)
        q = (
            split.permute(1, 2, 0, 3)
            .to(self.compute)
            .reshape(self.num_kv_heads, -1, self.head_size)
        )
        mask = (
            bias(length, cached, first_key, end_key, self.window, q.device).repeat(
                self.gqa_group, 1
            )
            if self.causal
            else None
        )
        scores = self._scores(q, keys, mask)
        sinks = None if self.sinks is None else self.sinks.repeat_interleave(length, 1)
        result = torch.bmm(_softmax(scores, sinks).to(values.dtype), values)
        result = result.view(self.num_kv_heads, self.gqa_group, length, self.head_size).permute(
            2, 0, 1, 3
        )
        out.view(length, self.num_kv_heads, self.gqa_group, self.head_size).copy_(result)

    def _fused_prompt(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        q = q.transpose(0, 1).to(self.compute)
        keys, values = keys.to(self.compute), values.to(self.compute)
        result = F.scaled_dot_product_attention(
            q.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            is_causal=self.causal,
            scale=self.scale,
            enable_gqa=self.gqa_group > 1,
        )
        out.copy_(result[0].transpose(0, 1))

    # -- shared

    def _scores(self, q: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        """Return scores, float32 ``[units, queries, width]``: scaled, soft-capped, masked.

        A bfloat16 product is rounded to 8 bits. A second product, minus the first before rounding,
        gives the rounding error, and their sum has 16 bits. Two bfloat16 products take less than
        half the time of a float32 product. The mask is added afterwards, as ``baddbmm`` rounds otherwise
        than ``bmm`` on some CPUs, and a row has a mask only if another one of its batch is shorter.
        """
        transposed = keys.transpose(1, 2)
        if q.dtype == torch.float32:
            scores = torch.bmm(q, transposed).mul_(self.scale)
        elif self.cpu:
            rounded = torch.bmm(q, transposed)
            rounding_error = torch.baddbmm(rounded, q, transposed, beta=-1)
            scores = rounded.float().add_(rounding_error).mul_(self.scale)
        else:
            scores = torch.bmm(q.float(), transposed.float()).mul_(self.scale)
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        return scores if mask is None else scores.add_(mask)

    def _load(self, cache: Tensor, row: PrefillRow, page_size: int) -> tuple[Tensor, Tensor, int]:
        """Return a row's keys and values ``[kv_heads, tokens, size]``, and the first position."""
        first = 0 if self.window is None else max(0, row.total - row.length - self.window + 1)
        if row.index is None:
            position = torch.arange(first, row.total, device=cache.device)
            slot = (
                row.pages[position // page_size].to(torch.int64) * page_size + position % page_size
            )
            heads = torch.arange(self.num_kv_heads, device=cache.device).unsqueeze(1)
            row.index = (slot * self.num_kv_heads + heads).view(-1)
        shape = (self.num_kv_heads, row.total - first, self.head_size)
        keys = self._gather(cache[0], row.index, "k").view(shape)
        return keys, self._gather(cache[1], row.index, "v").view(shape), first

    def _contiguous(self, x: Tensor) -> Tensor:
        return x.to(self.compute).contiguous()

    def _gather(self, kv_cache: Tensor, index: Tensor, name: str) -> Tensor:
        """Return rows ``index`` of keys or values, ``[len(index), size]``, in the compute dtype.

        The next gather of the same name overwrites the result.
        """
        source = kv_cache.view(-1, self.head_size)
        if source.dtype == self.compute:
            return torch.index_select(
                source, 0, index, out=self._buffer(name, len(index), self.compute)
            )
        if not is_fp8(source.dtype):
            raw = torch.index_select(
                source, 0, index, out=self._buffer(name, len(index), source.dtype)
            )
        else:
            raw = self._buffer(name, len(index), torch.uint8)
            raw = torch.index_select(source.view(torch.uint8), 0, index, out=raw).view(source.dtype)
        return self._buffer(name + "'", len(index), self.compute).copy_(raw)

    def _buffer(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        key = (name, dtype)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < rows:
            # Powers of two, so that a sequence that grows by a token does not allocate each step.
            buffer = torch.empty(
                1 << math.ceil(math.log2(rows)), self.head_size, dtype=dtype, device=self._device()
            )
            self._buffers[key] = buffer
        return buffer[:rows]

    def _device(self) -> torch.device:
        return torch.device("cpu" if self.cpu else "cuda")


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return weights of scores ``[units, queries, width]`` beside sinks ``[units, queries, 1]``."""
    if sinks is None:
        return torch.softmax(scores, -1)
    return torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]
