"""Attention on one CUDA device: is it right, and how near the ceiling is it?

::

    PYTHONPATH=core:kits/triton:kits/paged_attention:plugins/backends/attention/triton python benchmarks/attention.py [--parity | --time]
    python benchmarks/attention.py --compare triton flashinfer

Backends that are neither installed nor in the path are left out: ``attention_flashinfer`` and
``attention_xformers`` beside ``attention_triton``, with what they need.

First the backends against the float32 reference, on fresh random numbers, over poisoned caches and
outputs. Then times: each row is the median over replays of a CUDA graph that holds the calls of
several layers, each with a cache of its own, so that nothing is read from L2 that a model would read
from memory. ``TB/s`` counts keys and values once; ``TFLOP/s`` counts the causal half only.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import torch
from torch.nn import functional as F
from treadle_attention_triton.backend import create
from treadle_sdpa.sdpa import SdpaAttention

from treadle.api.attention import (
    AttentionBackend,
    AttentionOffer,
    AttentionRequest,
    CommonAttentionMetadata,
)
from treadle.api.cache import DeviceInfo, KVCacheSpec
from treadle.testing.attention import AttentionCase

HOOKS = {
    name: import_module(module).treadle_attention_backend
    for name, module in {
        "triton": "treadle_attention_triton",
        "flashinfer": "treadle_attention_flashinfer",
        "xformers": "treadle_attention_xformers",
        "sdpa": "treadle_sdpa",
    }.items()
    if find_spec(module)
}

SHAPES = {"0.6B": (16, 8), "8B": (32, 8)}
SIZE = 128
CACHE_BYTES = 400 << 20  # bytes of caches in rotation: several times an L2


def request(shape: str, dtype: str = "bfloat16", **changes: object) -> AttentionRequest:
    heads, kv_heads = SHAPES[shape]
    device = DeviceInfo("cuda", torch.cuda.get_device_capability())
    base = AttentionRequest(device, dtype, dtype, SIZE, heads, kv_heads, SIZE**-0.5)
    return replace(base, **changes)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------- parity


def parity() -> None:
    steps = {
        "decode": ([1] * 6, [1, 64, 65, 700, 4096, 1023]),
        "prompts": ([513, 64, 1000], [513, 64, 1000]),
        "chunks": ([300, 7], [1500, 900]),
        "mixed": ([1, 1, 1, 40, 257, 2], [900, 2, 3000, 40, 1025, 777]),
    }
    variants: dict[str, dict[str, object]] = {
        "": {},
        "window 500": {"window": 500},
        "cap 20": {"softcap": 20.0},
        "fp8 cache": {"kv_dtype": "fp8_e4m3"},
        "size 256": {"head_size": 256, "scale": 1 / 16},
        "size 80": {"head_size": 80, "scale": 80**-0.5},
    }
    print("relative error against float32 (worst of decode, prompts, chunks, mixed)")
    for name, changes in variants.items():
        for dtype in ("bfloat16", "float16", "float32"):
            attn_request = request("8B", dtype, **({"kv_dtype": dtype} | changes))
            limit = 8e-2 if "fp8" in name else {"float32": 1e-5}.get(dtype, 1e-2)
            text, status = f"  {dtype:9} {name:12}", "ok"
            for key, offer_for in HOOKS.items():
                offer = offer_for(attn_request, {})
                if not isinstance(offer, AttentionOffer):
                    text += f" {key} refuses "
                    continue
                max_error = max(
                    error(offer.create(), attn_request, *step) for step in steps.values()
                )
                text += f" {key} {max_error:.1e} "
                if max_error > limit:
                    status = "WRONG"
            print(f"{text} {status}")


def error(
    backend: AttentionBackend,
    attn_request: AttentionRequest,
    query_lens: list[int],
    kv_lens: list[int],
) -> float:
    seed = int(torch.randint(1 << 30, ()))
    case = AttentionCase(attn_request, query_lens, kv_lens, 64, device="cuda", seed=seed)
    cache = case.cache(backend)
    if attn_request.kv_dtype == attn_request.dtype:
        cache[cache == 7.0] = float("nan")  # whatever nobody wrote
    nan_buffer = torch.full((1 << 26,), float("nan"), device="cuda")  # freed: outputs land on it
    del nan_buffer
    actual = backend.forward(
        case.q, case.k, case.v, cache, backend.build_metadata(case.batch)
    ).double()
    expected = case.expected().double()
    relative_error = float((actual - expected).norm() / expected.norm())
    return relative_error if relative_error == relative_error else float("inf")


# ----------------------------------------------------------------------------------- time


def batch(
    query_lens: Sequence[int], kv_lens: Sequence[int], page_size: int
) -> tuple[CommonAttentionMetadata, int]:
    """Rows over shuffled pages."""
    num_pages = [-(-n // page_size) for n in kv_lens]
    order = torch.randperm(sum(num_pages)) + 1
    table = torch.zeros(len(kv_lens), max(num_pages), dtype=torch.int64)
    slots = []
    for row, pages in enumerate(order.split(num_pages)):
        table[row, : len(pages)] = pages
        positions = torch.arange(kv_lens[row] - query_lens[row], kv_lens[row])
        slots.append(pages[positions // page_size] * page_size + positions % page_size)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    decodes = sum(1 for n in query_lens if n == 1)
    metadata = CommonAttentionMetadata(
        page_size=page_size,
        num_decodes=decodes,
        max_query_len=max(query_lens),
        max_seq_len=max(kv_lens),
        query_start_loc=starts.int().cuda(),
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32).cuda(),
        page_table=table.int().cuda(),
        slot_mapping=torch.cat(slots).cuda(),
        query_lens_cpu=list(query_lens),
        seq_lens_cpu=list(kv_lens),
    )
    return metadata, sum(num_pages) + 1


class Load:
    """A step and enough caches to keep it cold."""

    def __init__(
        self,
        attn_request: AttentionRequest,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        page_size: int = 64,
    ) -> None:
        self.asked = attn_request
        self.batch, pages = batch(query_lens, kv_lens, page_size)
        spec = KVCacheSpec(
            "layer", attn_request.num_kv_heads, attn_request.head_size, attn_request.kv_dtype
        )
        shape = SdpaAttention(attn_request).kv_cache_shape(pages, page_size, spec)
        dtype = {"fp8_e4m3": torch.float8_e4m3fn}.get(attn_request.kv_dtype) or getattr(
            torch, attn_request.kv_dtype
        )
        cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype)
        self.caches = [
            cache.clone()
            for _ in range(max(1, min(64, CACHE_BYTES // (cache.numel() * cache.itemsize))))
        ]
        tokens = sum(query_lens)
        width = (attn_request.num_heads + 2 * attn_request.num_kv_heads) * attn_request.head_size
        qkv = torch.randn(tokens, width, device="cuda").to(getattr(torch, attn_request.dtype))
        kv = attn_request.num_kv_heads * attn_request.head_size
        parts = qkv.split([attn_request.num_heads * attn_request.head_size, kv, kv], 1)
        self.q, self.k, self.v = (x.unflatten(1, (-1, attn_request.head_size)) for x in parts)
        self.bytes = (
            sum(kv_lens) * attn_request.num_kv_heads * attn_request.head_size * 2 * cache.itemsize
        )
        num_scores = sum(
            n * (m - n) + n * (n + 1) / 2 for n, m in zip(query_lens, kv_lens, strict=True)
        )
        self.flops = 4 * num_scores * attn_request.num_heads * attn_request.head_size

    def layer(
        self,
        backend: AttentionBackend,
        metadata: object = None,
        *,
        write: bool = True,
        graph: bool = True,
    ) -> float:
        """Seconds per layer."""
        metadata = metadata or backend.build_metadata(self.batch)
        new_kv = (self.k, self.v) if write else (None, None)

        def layers() -> None:
            for cache in self.caches:
                backend.forward(self.q, *new_kv, cache, metadata)

        return seconds(layers, graph) / len(self.caches)


def seconds(call: Callable[[], object], graph: bool = True, budget: float = 0.12) -> float:
    """The median time of ``call`` on the device."""
    call()
    if graph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            call()
        call = captured.replay
    times: list[float] = []
    while sum(times) < budget or len(times) < 5:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


def ceilings() -> tuple[float, float]:
    """Copy bandwidth in B/s and bfloat16 products in FLOP/s of this card."""
    x = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_(0, 255)
    y = torch.empty_like(x)
    copy = 2 * len(x) / seconds(lambda: y.copy_(x), graph=False)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return copy, 2 * 8192**3 / seconds(lambda: a @ a, graph=False)


def line(
    name: str, elapsed: float, load: Load, ceiling: float, flops: bool, note: str = ""
) -> None:
    rate, unit = (load.flops / elapsed, 1e12) if flops else (load.bytes / elapsed, 1e12)
    unit_name = "TFLOP/s" if flops else "TB/s"
    print(
        f"{name:44} {elapsed * 1e6:9.1f} us {rate / unit:8.2f} {unit_name:7} {100 * rate / ceiling:5.1f} %  {note}",
        flush=True,
    )


def report() -> None:
    copy, product = ceilings()
    print(f"ceilings: copy {copy / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s")
    for shape in SHAPES:
        backend = create(request(shape))
        for rows in (1, 32, 256):
            for kv in (192, 1024, 4096):
                load = Load(request(shape), [1] * rows, [kv] * rows)
                with_write = load.layer(backend)
                note = f"with the cache write {with_write * 1e6:.1f} us"
                line(
                    f"{shape} decode B={rows} kv={kv}",
                    load.layer(backend, write=False),
                    load,
                    copy,
                    False,
                    note,
                )
                del load
        lengths = [int(n) for n in torch.randint(64, 2000, (256,))]
        load = Load(request(shape), [1] * 256, lengths)
        line(
            f"{shape} decode B=256 kv=64..2000", load.layer(backend, write=False), load, copy, False
        )
        fp8 = request(shape, kv_dtype="fp8_e4m3")
        load = Load(fp8, [1] * 256, [1024] * 256)
        line(
            f"{shape} decode B=256 kv=1024 fp8",
            load.layer(create(fp8), write=False),
            load,
            copy,
            False,
        )
        for name, step in {
            "prefill 16 x 2048": ([2048] * 16, [2048] * 16),
            "prefill 1 x 8192": ([8192], [8192]),
            "chunk 2048 after 6144": ([2048], [8192]),
            "drafts 1 x 5 (kv 4096)": ([5], [4096]),
            "drafts 32 x 5 (kv 1024)": ([5] * 32, [1024] * 32),
            "mixed 128 x 1 + 2 x 1024 (kv 2048)": (
                [1] * 128 + [1024] * 2,
                [1024] * 128 + [2048] * 2,
            ),
        }.items():
            load = Load(request(shape), *step)
            is_draft = name.startswith("drafts")
            elapsed = load.layer(backend, write=not is_draft)
            line(f"{shape} {name}", elapsed, load, copy if is_draft else product, not is_draft)
    load = Load(request("0.6B"), [1] * 32, [1024] * 32)
    print(f"Python of one decode call: {host(load, create(request('0.6B'))) * 1e6:.0f} us")
    sdpa = SdpaAttention(request("0.6B"))
    line("0.6B decode B=32 kv=1024, sdpa backend", load.layer(sdpa, graph=False), load, copy, False)
    load = Load(request("0.6B"), [2048] * 16, [2048] * 16)
    line("0.6B prefill 16 x 2048, sdpa backend", load.layer(sdpa, graph=False), load, product, True)
    q, k, v = (
        x.view(16, 2048, -1, SIZE).transpose(1, 2)
        for x in (load.q.contiguous(), load.k.contiguous(), load.v.contiguous())
    )
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for sdpa_backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(sdpa_backend):
            elapsed = seconds(
                lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            )
        line(
            f"0.6B prefill 16 x 2048, torch {sdpa_backend.name}",
            elapsed,
            load,
            product,
            True,
            "no pages",
        )


COMPARED = {
    "1 x 1024": ([1], [1024]),
    "8 x 2000": ([1] * 8, [2000] * 8),
    "32 x 1024": ([1] * 32, [1024] * 32),
    "256 x 1024": ([1] * 256, [1024] * 256),
    "256 x 8 to 2048": ([1] * 256, [8 * (n + 1) for n in range(256)]),
    "prompts 8 x 1024": ([1024] * 8, [1024] * 8),
    "prompts 8 x 2048": ([2048] * 8, [2048] * 8),
    "2048 after 6144": ([2048], [8192]),
}


def compare(names: Sequence[str]) -> None:
    """Backends beside each other, as a fused kernel leaves things: queries packed, keys written."""
    print(f"us per layer{'':38}" + "".join(f"{name:>12}" for name in names))
    for shape in SHAPES:
        for kv_dtype in ("bfloat16", "fp8_e4m3"):
            attn_request = request(shape, kv_dtype=kv_dtype)
            answers = {name: HOOKS[name](attn_request, {}) for name in names}
            offers = {
                name: answer
                for name, answer in answers.items()
                if isinstance(answer, AttentionOffer)
            }
            backends = {name: offer.create() for name, offer in offers.items()}
            for step, (query_lens, kv_lens) in COMPARED.items():
                load = Load(attn_request, query_lens, kv_lens)
                load.q = load.q.contiguous()
                text = f"{shape} {kv_dtype:10} {step:32}"
                for name in names:
                    if name not in backends:
                        text += f"{'refuses':>12}"
                        continue
                    # As the runner does: it captures decode steps where a backend's can be.
                    graph = max(query_lens) == 1 and offers[name].graph_safe
                    elapsed = load.layer(backends[name], write=False, graph=graph)
                    text += f"{elapsed * 1e6:12.1f}"
                print(text, flush=True)
                del load


def host(load: Load, backend: AttentionBackend) -> float:
    """Seconds of Python per layer and step, measured while the device keeps up."""
    metadata = backend.build_metadata(load.batch)
    args = (load.k, load.v, load.caches[0], metadata)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(20):
        backend.forward(load.q, *args)
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return elapsed / 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention on one CUDA device.")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--parity", action="store_true", help="only check the results")
    group.add_argument("--time", action="store_true", help="only measure")
    group.add_argument(
        "--compare", nargs="+", choices=HOOKS, help="only measure these, side by side"
    )
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if options.compare:
        compare(options.compare)
        return
    if not options.time:
        parity()
    if not options.parity:
        report()


if __name__ == "__main__":
    main()
