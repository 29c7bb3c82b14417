"""The host's side: which requests and steps it serves, the list of tiles, the launch, a trial."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.api.types import AttentionRequest, CommonAttentionMetadata, MaskKind
from treadle_triton_kit.compile_ahead import is_collecting
from treadle_triton_kit.self_check import self_check
from treadle_triton_kit.tma import tensor_descriptor

__all__ = ("BLOCK_M", "PAGE_SIZE", "HopperPrefill", "WorkItem", "supports")

log = logging.getLogger(__name__)

BLOCK_M = 128  # rows of queries: tokens times the group's heads
PAGE_SIZE = 64
_HEAD_DIM = 128
_LOG2E = 1.4426950408889634

WorkItem = tuple[int, int, int, int, int]
"""Row, first token among those of the step, real tokens, position of the first, keys of the row."""


def supports(request: AttentionRequest) -> bool:
    """Whether the kernel can do what ``request`` asks for, on any device."""
    gqa_group = request.num_heads // request.num_kv_heads
    return (
        (request.device.capability or (0, 0))[0] == 9
        and request.mask is MaskKind.CAUSAL
        and request.window is None
        and request.dtype in ("bfloat16", "float16")
        and request.kv_dtype in ("auto", request.dtype)
        and request.head_size == _HEAD_DIM
        and request.page_size in (None, PAGE_SIZE)
        and request.softcap is None
        and not request.sinks
        and gqa_group <= 64
        and gqa_group & (gqa_group - 1) == 0
    )


class HopperPrefill:
    """Attends for rows of several new tokens, of a request that it :func:`supports`."""

    def __init__(self, request: AttentionRequest, num_sms: int) -> None:
        self.num_kv_heads = request.num_kv_heads
        self.gqa_group = request.num_heads // request.num_kv_heads
        self.qk_scale = request.scale * _LOG2E
        self.num_sms = num_sms
        self._dtype: torch.dtype = getattr(torch, request.dtype)
        self._works: bool | None = None

    @property
    def works(self) -> bool:
        """Whether the kernel works on this device, which nothing but a trial can tell.

        The trial comes with the first step that has such rows, not when the model is built: so nothing
        waits for this kernel, which is the longest to compile, before all others are being compiled.
        """
        if self._works is not None:
            return self._works
        warning = "no kernel of Hopper's for prompts here (%s): Triton's serves them"
        works = self_check(partial(_self_check, self, self._dtype), log, warning)
        if not is_collecting():
            self._works = works
        return works

    def build_work_items(
        self, batch: CommonAttentionMetadata, rows: Sequence[int]
    ) -> list[WorkItem]:
        """The tiles of ``rows``, those with the most keys first."""
        tokens_per_tile = BLOCK_M // self.gqa_group
        work_items: list[WorkItem] = []
        query_starts = [0]
        for query_len in batch.query_lens_cpu:
            query_starts.append(query_starts[-1] + query_len)
        for row in rows:
            query_len, seq_len = batch.query_lens_cpu[row], batch.seq_lens_cpu[row]
            for first_query in range(0, query_len, tokens_per_tile):
                valid_tokens = min(tokens_per_tile, query_len - first_query)
                work_items.append(
                    (
                        row,
                        query_starts[row] + first_query,
                        valid_tokens,
                        seq_len - query_len + first_query,
                        seq_len,
                    )
                )
        work_items.sort(key=lambda tile: -(tile[2] + tile[3]))
        return work_items

    def forward(
        self,
        q: Tensor,
        cache: Tensor,
        out: Tensor,
        batch: CommonAttentionMetadata,
        work_items: Tensor,
    ) -> None:
        """Write the rows of ``work_items`` into ``out``.

        ``q`` and ``out`` are ``[tokens, heads, 128]`` with dense tokens, ``out`` contiguous;
        ``cache`` is ``[2, pages, 64, kv_heads, 128]``, contiguous; ``work_items`` int32 ``[tiles, 5]``.
        """
        from treadle_attention_triton.hopper.kernel import REGISTERS, WARPS, hopper_prefill_kernel

        if q.data_ptr() % 16 or q.stride(0) % 8:  # TMA's
            q = q.clone(memory_format=torch.contiguous_format)
        q_desc = tensor_descriptor(q, (64 // self.gqa_group, self.gqa_group, 64))
        kv_rows = cache.view(-1, self.num_kv_heads * _HEAD_DIM)
        kv_desc = tensor_descriptor(kv_rows, (PAGE_SIZE, 64))
        total_items = len(work_items) * self.num_kv_heads
        hopper_prefill_kernel[(min(total_items, self.num_sms),)](
            q_desc, kv_desc, out.view(torch.int32), batch.page_table, work_items,
            batch.page_table.stride(0), total_items, len(kv_rows) // 2, self.qk_scale,
            NUM_KV_HEADS=self.num_kv_heads, GQA_GROUP=self.gqa_group, num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip


def _self_check(hopper_prefill: HopperPrefill, dtype: torch.dtype) -> bool:
    """A row of 70 tokens, of which the last 40 are new, in two pages of three."""
    generator = torch.Generator("cuda").manual_seed(0)
    query_len, seq_len, num_heads = 40, 70, hopper_prefill.num_kv_heads * hopper_prefill.gqa_group

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    q, cache = (
        random(query_len, num_heads, _HEAD_DIM),
        random(2, 3, PAGE_SIZE, hopper_prefill.num_kv_heads, _HEAD_DIM),
    )
    cache[:, 0] = cache[:, 1, seq_len - PAGE_SIZE :] = torch.nan  # what nobody wrote

    def ints(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    batch = CommonAttentionMetadata(
        page_size=PAGE_SIZE,
        num_decodes=0,
        max_query_len=query_len,
        max_seq_len=seq_len,
        query_start_loc=ints([0, query_len]),
        seq_lens=ints([seq_len]),
        page_table=ints([[2, 1]]),
        slot_mapping=torch.empty(0, dtype=torch.int64, device="cuda"),
        query_lens_cpu=[query_len],
        seq_lens_cpu=[seq_len],
    )
    out = torch.empty_like(q)
    work_items = ints(hopper_prefill.build_work_items(batch, [0]))
    hopper_prefill.forward(q, cache, out, batch, work_items)
    queries = q.float().transpose(0, 1)
    keys, values = (half[[2, 1]].flatten(0, 1)[:seq_len].float().transpose(0, 1) for half in cache)
    position = torch.arange(seq_len, device="cuda")
    expected = F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=position <= position[-query_len:, None],
        scale=hopper_prefill.qk_scale / _LOG2E,
        enable_gqa=True,
    ).transpose(0, 1)
    return bool((out.float() - expected).norm() < 0.02 * expected.norm())
