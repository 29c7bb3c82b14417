"""The host's side: which requests and steps it serves, the list of tiles, the launch, a trial."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.api.types import AttentionRequest, CommonAttentionMetadata, MaskKind
from treadle_triton_kit.self_check import self_check
from treadle_triton_kit.tma import tensor_descriptor

__all__ = ("PAGE", "TILE", "Prompts", "Work", "find_prompts", "serves")

log = logging.getLogger(__name__)

TILE = 128  # rows of queries: tokens times the group's heads
PAGE = 64
_SIZE = 128
_LOG2E = 1.4426950408889634

Work = tuple[int, int, int, int, int]
"""Row, first token among those of the step, real tokens, position of the first, keys of the row."""


def serves(request: AttentionRequest) -> bool:
    """Whether the kernel can do what ``request`` asks for, on any device."""
    group = request.num_heads // request.num_kv_heads
    return (
        (request.device.capability or (0, 0))[0] == 9
        and request.mask is MaskKind.CAUSAL
        and request.window is None
        and request.dtype in ("bfloat16", "float16")
        and request.kv_dtype in ("auto", request.dtype)
        and request.head_size == _SIZE
        and request.page_size in (None, PAGE)
        and request.softcap is None
        and group <= 64
        and group & (group - 1) == 0
    )


class Prompts:
    """Attends for rows of several new tokens, of a request that it :func:`serves`."""

    def __init__(self, request: AttentionRequest, processors: int) -> None:
        self.kv_heads = request.num_kv_heads
        self.group = request.num_heads // request.num_kv_heads
        self.scale = request.scale * _LOG2E
        self.processors = processors

    def tiles(self, batch: CommonAttentionMetadata, rows: Sequence[int]) -> list[Work]:
        """The tiles of ``rows``, those with the most keys first."""
        tokens = TILE // self.group
        work: list[Work] = []
        begins = [0]
        for count in batch.query_lens_cpu:
            begins.append(begins[-1] + count)
        for row in rows:
            count, length = batch.query_lens_cpu[row], batch.seq_lens_cpu[row]
            for first in range(0, count, tokens):
                real = min(tokens, count - first)
                work.append((row, begins[row] + first, real, length - count + first, length))
        work.sort(key=lambda tile: -(tile[2] + tile[3]))
        return work

    def forward(
        self, q: Tensor, cache: Tensor, out: Tensor, batch: CommonAttentionMetadata, work: Tensor
    ) -> None:
        """Write the rows of ``work`` into ``out``.

        ``q`` and ``out`` are ``[tokens, heads, 128]`` with dense tokens, ``out`` contiguous;
        ``cache`` is ``[2, pages, 64, kv_heads, 128]``, contiguous; ``work`` int32 ``[tiles, 5]``.
        """
        from treadle_attention_triton.hopper.kernel import REGISTERS, WARPS, prompt_kernel

        if q.data_ptr() % 16 or q.stride(0) % 8:  # TMA's
            q = q.clone(memory_format=torch.contiguous_format)
        queries = tensor_descriptor(q, (64 // self.group, self.group, 64))
        flat = cache.view(-1, self.kv_heads * _SIZE)
        pages = tensor_descriptor(flat, (PAGE, 64))
        units = len(work) * self.kv_heads
        prompt_kernel[(min(units, self.processors),)](
            queries, pages, out.view(torch.int32), batch.page_table, work,
            batch.page_table.stride(0), units, len(flat) // 2, self.scale,
            KV_HEADS=self.kv_heads, GROUP=self.group, num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip


def find_prompts(request: AttentionRequest, processors: int) -> Prompts | None:
    """For requests and devices where the kernel works, which nothing but a trial can tell."""
    if not serves(request):
        return None
    prompts = Prompts(request, processors)
    warning = "no kernel of Hopper's for prompts here (%s): Triton's serves them"
    trial = partial(_self_check, prompts, getattr(torch, request.dtype))
    return prompts if self_check(trial, log, warning) else None


def _self_check(prompts: Prompts, dtype: torch.dtype) -> bool:
    """A row of 70 tokens, of which the last 40 are new, in two pages of three."""
    made = torch.Generator("cuda").manual_seed(0)
    new, length, heads = 40, 70, prompts.kv_heads * prompts.group

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, device="cuda").to(dtype)

    q, cache = random(new, heads, _SIZE), random(2, 3, PAGE, prompts.kv_heads, _SIZE)
    cache[:, 0] = cache[:, 1, length - PAGE :] = torch.nan  # what nobody wrote

    def ints(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    batch = CommonAttentionMetadata(
        page_size=PAGE,
        num_decodes=0,
        max_query_len=new,
        max_seq_len=length,
        query_start_loc=ints([0, new]),
        seq_lens=ints([length]),
        page_table=ints([[2, 1]]),
        slot_mapping=torch.empty(0, dtype=torch.int64, device="cuda"),
        query_lens_cpu=[new],
        seq_lens_cpu=[length],
    )
    out = torch.empty_like(q)
    work = ints(prompts.tiles(batch, [0]))
    prompts.forward(q, cache, out, batch, work)
    queries = q.float().transpose(0, 1)
    keys, values = (half[[2, 1]].flatten(0, 1)[:length].float().transpose(0, 1) for half in cache)
    position = torch.arange(length, device="cuda")
    want = F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=position <= position[-new:, None],
        scale=prompts.scale / _LOG2E,
        enable_gqa=True,
    ).transpose(0, 1)
    return bool((out.float() - want).norm() < 0.02 * want.norm())
