"""The host's side of decode batches: how a product is divided and where that is faster, a trial."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle_kernels_triton.split_k_reduce import reduce_split_k
from treadle_triton_kit.self_check import checked_once, self_check
from treadle_triton_kit.tma import is_tma_readable, tensor_descriptor

__all__ = (
    "MAX_ROWS",
    "SmallBatchLinear",
    "TileConfig",
    "choose_gated_tile_config",
    "choose_tile_config",
    "create_small_batch_linear",
)

log = logging.getLogger(__name__)

MAX_ROWS = 256
MIN_FEATURES = 1024
"""Features, and depth, of the smallest weight that was measured."""
MAX_WEIGHT_ELEMENTS = 1 << 27
"""Elements of a weight from which cuBLAS is at the card's bandwidth: output heads."""
_BOX_SIZE = 64  # features of a warp group, rows of a box, columns of a step


@dataclass(frozen=True, slots=True)
class TileConfig:
    """A tile has 64 · ``num_warp_groups`` rows of the weight and ``block_m`` of ``x``; ``num_splits`` programs share its
    depth. Of a ``gated`` one half the rows of the weight are the gate's, and its depth is not shared."""

    num_warp_groups: int
    block_m: int
    num_splits: int = 1
    gated: bool = False

    @property
    def num_stages(self) -> int:
        """Steps on their way. Four at least; no more than leave room for the programs of the kernel
        ahead, or this one would not start early."""
        stage_bytes = (_BOX_SIZE * self.num_warp_groups + self.block_m) * _BOX_SIZE * 2
        return min(10, max(4, (201 << 10) // stage_bytes))

    @property
    def acc0_m(self) -> int:
        """Rows that one instruction multiplies, a power of two. With three groups no more than 128: it may
        have no more registers than a thread has on average."""
        return (
            128
            if self.block_m == 192 or (self.num_warp_groups == 3 and self.block_m > 128)
            else self.block_m
        )

    @property
    def store_rows(self) -> int:
        """Rows that are written at once, for which results have one descriptor."""
        return self.block_m - self.acc0_m or self.acc0_m

    def num_programs(self, rows: int, out_features: int) -> int:
        """For ``x [rows, ..]`` and a weight ``[out_features, ..]``."""
        return (
            _cdiv(out_features, _BOX_SIZE * self.num_warp_groups)
            * _cdiv(rows, self.block_m)
            * self.num_splits
        )


ConfigChooser = Callable[[int, int, int, int], TileConfig | None]
"""Of rows, features, depth and multiprocessors; ``None``: use torch."""


def _cdiv(count: int, size: int) -> int:
    return -(-count // size)


def choose_tile_config(
    rows: int, out_features: int, in_features: int, num_sms: int
) -> TileConfig | None:
    """For ``x [rows, in_features]`` and a weight ``[out_features, in_features]``.

    As times the speed of what else there is (cuBLAS with a bias of zeros or without), in graphs over cold
    weights on one H200 (132 multiprocessors, torch 2.11, Triton 3.6). Narrow weights in parts, with the
    norm that adds them up: 1.2 to 1.7 for 1024 x 2048 and 1024 x 3072 at 8 to 256 rows; eight shares of
    the depth are slower than four. 4096 x 1024: 1.0 to 1.2 to 64 rows, 1.04 to 1.16 beyond. 4096 x 2048:
    1.0 to 64 rows, 1.03 to 1.12 to 128, 0.99 at 160, 1.09 to 1.15 beyond. 3072 x 4096: 1.16 at 192, 1.05
    at 256, else slower from 48 rows on. 6144 x 4096: 1.01 to 1.09 to 64 rows, 1.15 and 1.07 at 224 and 240,
    for which cuBLAS chooses badly, as for 176 (25.6 us there; the kernel 22.6 at 160 and 22.9 at 192, another
    card), else slower. In parts 4096 x 4096: 1.0 to 1.07 to 64 rows, beyond slower; 4096 x 12288: 1.0 to 1.04
    to 64 rows, 1.13 and 1.08 at 224 and 240, and 1.02 at 192 and 256, where whole steps were slower with it.
    """
    is_small, is_large = (
        min(out_features, in_features) < MIN_FEATURES,
        out_features * in_features > MAX_WEIGHT_ELEMENTS,
    )
    num_weight_tiles = _cdiv(out_features, _BOX_SIZE)
    if (
        not 2 <= rows <= MAX_ROWS
        or is_small
        or is_large
        or out_features % 8
        or num_weight_tiles > num_sms
    ):
        return None
    is_narrow = out_features <= 2048 <= in_features
    if rows <= 64:
        splits = 2 if in_features >= 4096 and 2 * num_weight_tiles <= num_sms else 1
        return TileConfig(1, 64, min(4, num_sms // num_weight_tiles) if is_narrow else splits)
    num_row_tiles = _cdiv(rows, 128)
    config = None
    if is_narrow:
        splits = min(4, num_sms // (num_weight_tiles * num_row_tiles))
        config = TileConfig(1, 128, splits) if splits > 1 else None
    elif in_features <= 2048:
        config = TileConfig(1, 64 if rows <= 128 else 128)
    elif out_features > 4096 and (161 <= rows <= 176 or 209 <= rows <= 240):
        config = TileConfig(2, 128)
    elif out_features <= 4096 and in_features >= 8192 and 209 <= rows <= 240:
        config = TileConfig(2, 256, 4)
    elif out_features <= 3072 and in_features <= 4096 and (177 <= rows <= 192 or rows > 240):
        config = TileConfig(1, 128)
    return config if config and config.num_programs(rows, out_features) <= num_sms else None


def choose_gated_tile_config(
    rows: int, out_features: int, in_features: int, num_sms: int
) -> TileConfig | None:
    """The same for ``linear_silu_and_mul``; ``out_features`` are those of both halves, and for few of them most of the
    multiprocessors would have nothing to do.

    6144 x 1024: 1.04 to 1.07 to 64 rows, 1.13 to 1.17 to 192, 1.11 to 1.20 beyond. 24576 x 4096: 1.01 to
    1.06 to 64 rows, 1.06 to 1.08 to 128, 1.02 to 1.04 to 192, 1.05 from 224 on, slower at 208. 12288 x 4096:
    1.0 to 160 rows, 1.30 at 192, for which cuBLAS chooses badly, 1.00 to 1.03 from 224 on, slower at 208.
    """
    num_weight_tiles = _cdiv(out_features, _BOX_SIZE)
    num_warp_groups = _cdiv(num_weight_tiles, num_sms)
    is_small = min(out_features, in_features) < MIN_FEATURES or 3 * num_weight_tiles < num_sms
    if not 2 <= rows <= MAX_ROWS or is_small or out_features % 16 or num_warp_groups > 3:
        return None
    if rows <= 192:
        config = TileConfig(num_warp_groups, _cdiv(rows, 64) * 64, gated=True)
    elif num_warp_groups == 1:
        config = TileConfig(2, 128, gated=True)
    elif rows > 208:
        config = TileConfig(3, 256 if num_warp_groups == 3 else 128, gated=True)
    else:
        return None
    return config if config.num_programs(rows, out_features) <= num_sms else None


class SmallBatchLinear:
    """Multiplies rows of ``dtype`` by weights; see ``small_batch_kernel``. Uses only what ``usable`` has.

    To be captured: a launch, with four descriptors, takes the host 60 us more than torch's linear (13), and
    steps of few rows that are not captured wait for the host.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        num_sms: int,
        choose_config: ConfigChooser,
        usable_configs: Iterable[TileConfig],
    ) -> None:
        self.dtype = dtype
        self.num_sms = num_sms
        self._choose_config = choose_config
        self._configs = frozenset(usable_configs)
        self.split_counts = sorted({config.num_splits for config in self._configs} - {1})
        """How many parts there may be."""

    def tile_config(self, x: Tensor, weight: Tensor) -> TileConfig | None:
        """For ``x [rows, in_features]`` and ``weight [out_features, in_features]``; ``None``: use torch."""
        if not torch.cuda.is_current_stream_capturing():
            return None
        (rows, in_features), out_features = x.shape, len(weight)
        config = self._choose_config(rows, out_features, in_features, self.num_sms)
        supported = is_tma_readable(x, self.dtype) and is_tma_readable(weight, self.dtype)
        return config if config in self._configs and supported and weight.is_contiguous() else None

    def multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, config: TileConfig
    ) -> Tensor:
        """``[rows, features]`` in the dtype of ``x``; ``silu`` of the first half of them times the second,
        if ``config`` is gated; if it splits the depth, float32 ``[num_splits, rows, features]``, the sum of
        which it is. Only what is neither has a bias."""
        # Here, for Gluon is an experiment of Triton's: it may be gone, and that hurts nobody else.
        from treadle_kernels_triton.hopper.small_batch_kernel import (
            REGISTERS,
            WARPS,
            small_batch_kernel,
        )

        (rows, in_features), features = x.shape, len(weight)
        is_split_k, x_desc_16 = config.num_splits > 1, tensor_descriptor(x, (16, _BOX_SIZE))
        if is_split_k:
            shape = (config.num_splits, rows, features)
            out = torch.empty(shape, dtype=torch.float32, device=x.device)
            out_desc = x_desc_16  # not used
        else:
            out_features = features // 2 if config.gated else features
            out = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
            out_desc = tensor_descriptor(
                out, (config.store_rows, 32 if config.gated else _BOX_SIZE)
            )
        small_batch_kernel[(config.num_programs(rows, features),)](
            tensor_descriptor(x, (_BOX_SIZE, _BOX_SIZE)), x_desc_16, _weight_descriptor(weight, config.gated), out_desc,
            x if bias is None else bias, out,
            rows, features, _cdiv(rows, config.block_m), _cdiv(in_features, _BOX_SIZE), config.num_splits,
            int(bias is not None),
            NUM_WARP_GROUPS=config.num_warp_groups, BLOCK_M=config.block_m, ACC0_M=config.acc0_m, NUM_STAGES=config.num_stages,
            GATED=config.gated, SPLIT_K=is_split_k,
            num_warps=WARPS, maxnreg=REGISTERS[config.num_warp_groups - 1], launch_pdl=True,
        )  # fmt: skip
        return out


def _weight_descriptor(weight: Tensor, gated: bool) -> object:
    """64 rows of a weight; if ``gated``, eight of its first half, eight of its second, and so on."""
    if not gated:
        return tensor_descriptor(weight, (_BOX_SIZE, _BOX_SIZE))
    features, in_features = weight.shape
    half_features = features // 2
    interleaved = weight.as_strided(
        (half_features // 8, 2, 8, in_features),
        (8 * in_features, half_features * in_features, in_features, 1),
    )
    return tensor_descriptor(interleaved, (4, 2, 8, _BOX_SIZE))


def create_small_batch_linear(
    dtype: str, out_features: int, in_features: int, choose_config: ConfigChooser
) -> SmallBatchLinear | None:
    """For one weight, on devices where the kernel works, which nothing but a trial can tell.

    The trials also compile it for every division that is chosen, so that no captured call has to.
    """
    if dtype not in ("bfloat16", "float16") or not _kernel_works(dtype):
        return None
    torch_dtype = getattr(torch, dtype)
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    configs = {
        choose_config(rows, out_features, in_features, num_sms) for rows in range(1, MAX_ROWS + 1)
    }
    usable_configs = [config for config in configs if config and _config_works(torch_dtype, config)]
    return (
        SmallBatchLinear(torch_dtype, num_sms, choose_config, usable_configs)
        if usable_configs
        else None
    )


@checked_once
def _kernel_works(dtype: str) -> bool:
    """Once for a process: where it does not work at all, one warning is enough."""
    return _config_works(getattr(torch, dtype), TileConfig(1, 64))


def _config_works(dtype: torch.dtype, config: TileConfig) -> bool:
    warning = "no products of decode batches on Hopper here (%s): torch's linear serves"
    return self_check(lambda: _self_check(dtype, config), log, warning)


def _self_check(dtype: torch.dtype, config: TileConfig) -> bool:
    """Several tiles both ways, with parts of tiles at the end of rows, features and depth."""
    generator = torch.Generator("cuda").manual_seed(0)
    rows, width, in_features = (
        config.block_m + 37,
        64 * config.num_warp_groups + 40,
        64 * config.num_splits + 200,
    )
    features = 2 * width if config.gated else width

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    x, weight, bias = (
        random(rows, in_features),
        random(features, in_features) * in_features**-0.5,
        random(features),
    )
    is_plain = config.num_splits == 1 and not config.gated
    small_batch = SmallBatchLinear(dtype, 1, choose_tile_config, ())
    for case_bias in (None, bias) if is_plain else (None,):
        expected = F.linear(
            x.float(), weight.float(), None if case_bias is None else case_bias.float()
        )
        if config.gated:
            gate, up = expected.chunk(2, 1)
            expected = F.silu(gate) * up
        actual = small_batch.multiply(x, weight, case_bias, config)
        if config.num_splits > 1:  # which compiles what adds them, too
            actual = reduce_split_k(actual, None, dtype, use_pdl=True)
        if not bool((actual.float() - expected).norm() < 0.02 * expected.norm()):
            return False
    return True
