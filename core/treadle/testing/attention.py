"""The conformance suite of attention backends.

::

    class TestMine(PluginSuite, AttentionSuite):
        plugin = "attention_backends:mine"
        device = DeviceInfo("cuda", (9, 0))              # the device to offer for and to run on

Every request of the grid is put to the backend. What it offers for is run and compared with
``treadle.testing.attention_reference``; what it cannot serve must be a ``Refusal`` with reasons. The
suite knows nothing of a backend's cache layout: tokens get into the cache through ``forward``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from treadle.api.attention import (
    AttentionOffer,
    AttentionRequest,
    MaskKind,
    Refusal,
    SupportsExternalKVWrite,
    SupportsOutputBuffer,
)
from treadle.api.cache import DeviceInfo, KVCacheSpec
from treadle.testing.plugin import PluginTest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from treadle.api.attention import AttentionBackend, CommonAttentionMetadata
    from treadle.plugins import PluginManager

__all__ = ("AttentionCase", "AttentionSuite", "requests", "steps")

_BASE_REQUEST = AttentionRequest(
    DeviceInfo("cpu"), "float32", "float32", head_size=64, num_heads=4, num_kv_heads=2, scale=0.125
)

requests: dict[str, AttentionRequest] = {
    "float32": _BASE_REQUEST,
    "bfloat16": replace(_BASE_REQUEST, dtype="bfloat16", kv_dtype="bfloat16"),
    "float16": replace(_BASE_REQUEST, dtype="float16", kv_dtype="float16"),
    "fp8_e4m3": replace(_BASE_REQUEST, dtype="bfloat16", kv_dtype="fp8_e4m3"),
    "fp8_e5m2": replace(_BASE_REQUEST, dtype="bfloat16", kv_dtype="fp8_e5m2"),
    "one query head per kv head": replace(_BASE_REQUEST, num_heads=3, num_kv_heads=3),
    "one kv head": replace(_BASE_REQUEST, num_heads=7, num_kv_heads=1),
    "head size 32": replace(_BASE_REQUEST, head_size=32, scale=32**-0.5),
    "head size 80": replace(_BASE_REQUEST, head_size=80, scale=80**-0.5),
    "head size 96": replace(_BASE_REQUEST, head_size=96, scale=96**-0.5),
    "head size 128": replace(_BASE_REQUEST, head_size=128, scale=128**-0.5),
    "head size 256": replace(_BASE_REQUEST, head_size=256, scale=1 / 16),
    "narrow window": replace(_BASE_REQUEST, mask=MaskKind.SLIDING, window=5),
    "wide window": replace(_BASE_REQUEST, mask=MaskKind.SLIDING, window=40),
    "soft cap": replace(_BASE_REQUEST, softcap=2.0),
    "soft cap and window": replace(_BASE_REQUEST, softcap=2.0, mask=MaskKind.SLIDING, window=24),
    "bidirectional": replace(_BASE_REQUEST, mask=MaskKind.BIDIRECTIONAL),
    "sinks": replace(_BASE_REQUEST, sinks=True),
    "sinks and window": replace(
        _BASE_REQUEST, sinks=True, mask=MaskKind.SLIDING, window=24, num_heads=8, num_kv_heads=1
    ),
}

steps: dict[str, tuple[list[int], list[int]]] = {
    "one decode": ([1], [37]),
    "first token": ([1], [1]),
    "decodes": ([1] * 5, [1, 16, 17, 70, 33]),
    "prompts": ([7, 33, 2], [7, 33, 2]),
    "prefix hit": ([9, 3], [41, 19]),
    "chunk": ([40], [75]),
    "last tokens": ([20, 1, 1], [20, 60, 290]),  # of prompts: no decodes, for they are not first
    "mixed": ([1, 1, 1, 6, 21, 3], [50, 2, 31, 6, 60, 35]),
}

# Requests that many backends cannot serve: any answer will do, an exception will not.
_UNUSUAL_REQUESTS: dict[str, AttentionRequest] = {
    "tree": replace(_BASE_REQUEST, mask=MaskKind.TREE),
    "prefix": replace(_BASE_REQUEST, mask=MaskKind.PREFIX),
    "latent": replace(_BASE_REQUEST, latent=True),
    "unknown device": replace(_BASE_REQUEST, device=DeviceInfo("abacus")),
    "old device": replace(_BASE_REQUEST, device=DeviceInfo("cuda", (3, 5))),
    "unknown dtype": replace(_BASE_REQUEST, dtype="int3", kv_dtype="int3"),
    "unknown kv_dtype": replace(_BASE_REQUEST, kv_dtype="int3"),
    "uneven heads": replace(_BASE_REQUEST, num_heads=5, num_kv_heads=2),
    "no kv heads": replace(_BASE_REQUEST, num_kv_heads=0),
    "odd head size": replace(_BASE_REQUEST, head_size=7),
    "huge head size": replace(_BASE_REQUEST, head_size=1000),
    "odd page size": replace(_BASE_REQUEST, page_size=3),
    "no window": replace(_BASE_REQUEST, mask=MaskKind.SLIDING),
    "empty window": replace(_BASE_REQUEST, mask=MaskKind.SLIDING, window=0),
    "bidirectional window": replace(_BASE_REQUEST, mask=MaskKind.BIDIRECTIONAL, window=4),
}

# What ||out - reference|| / ||reference|| may be. The fp8 bounds are the rounding of the cache.
_TOLERANCE = {
    "float32": 1e-3,  # tf32 on a GPU is an answer of its own right; the rest is far below
    "float16": 3e-3,
    "bfloat16": 1e-2,
    "fp8_e4m3": 8e-2,
    "fp8_e5m2": 1.5e-1,
}


class AttentionCase:
    """Random queries, keys and values of one step, and what must come out.

    ``page_size`` tokens a page; rows own shuffled pages; the page table is wider than needed.
    With ``scales`` keys and values are as large as a cache with these scales is made for.
    """

    def __init__(
        self,
        request: AttentionRequest,
        query_lens: list[int],
        kv_lens: list[int],
        page_size: int,
        *,
        device: str,
        seed: int = 0,
        scales: tuple[float, float] | None = None,
    ) -> None:
        import torch

        from treadle.testing.attention_reference import batch_of

        self.request = request
        self.scales = () if scales is None else (scales,)
        self.device = device
        self.page_size = page_size
        self.query_lens, self.kv_lens = query_lens, kv_lens
        self.batch, self.pages = batch_of(
            query_lens, kv_lens, page_size=page_size, device=device, shuffle=seed, spare_columns=2
        )
        self.dtype: torch.dtype = getattr(torch, request.dtype)
        generator = torch.Generator().manual_seed(seed)

        def random(tokens: int, heads: int) -> Tensor:
            x = torch.randn(tokens, heads, request.head_size, generator=generator)
            return x.to(device, self.dtype)

        sinks = torch.linspace(-1, 4, request.num_heads, dtype=torch.float32, device=device)
        self.options: dict[str, Any] = {"sinks": sinks} if request.sinks else {}
        self.queries = [random(n, request.num_heads) for n in query_lens]
        self.keys = [random(n, request.num_kv_heads) for n in kv_lens]
        self.values = [random(n, request.num_kv_heads) for n in kv_lens]
        if scales is not None:  # the size that needs them
            self.keys = [x * scales[0] for x in self.keys]
            self.values = [x * scales[1] for x in self.values]

    def cache(self, backend: AttentionBackend) -> Tensor:
        """A cache that holds, beside garbage, the tokens that came before the step."""
        import torch

        request = self.request
        spec = KVCacheSpec("layer", request.num_kv_heads, request.head_size, request.kv_dtype)
        shape = backend.kv_cache_shape(self.pages, self.page_size, spec)
        cache = torch.full(shape, 7.0).to(self.device, _storage(request.kv_dtype))
        cached_lens = [n - m for n, m in zip(self.kv_lens, self.query_lens, strict=True)]
        # Rows of one token are decodes to a backend, and decodes come first.
        rows = sorted((r for r, n in enumerate(cached_lens) if n), key=lambda r: cached_lens[r] > 1)
        if rows:
            lengths = [cached_lens[r] for r in rows]
            k = torch.cat([self.keys[r][: cached_lens[r]] for r in rows])
            v = torch.cat([self.values[r][: cached_lens[r]] for r in rows])
            q = k.new_zeros(len(k), request.num_heads, request.head_size)
            batch = self._batch(rows, lengths)
            plan = backend.build_metadata(batch)
            backend.forward(q, k, v, cache, plan, *self.scales, **self.options)
        return cache

    def _batch(self, rows: list[int], lengths: list[int]) -> CommonAttentionMetadata:
        """The step that writes the first ``lengths`` tokens of ``rows`` into this case's pages."""
        import torch

        from treadle.testing.attention_reference import batch_of

        size = self.page_size
        batch, _ = batch_of(lengths, lengths, page_size=size, device=self.device)
        batch.page_table = self.batch.page_table[rows]
        pages = self.batch.page_table.tolist()
        slots = [
            pages[r][p // size] * size + p % size
            for r, n in zip(rows, lengths, strict=True)
            for p in range(n)
        ]
        batch.slot_mapping = torch.tensor(slots, device=self.device)
        return batch

    def poison(self, backend: AttentionBackend, cache: Tensor) -> None:
        """Fill page 0 with NaN."""
        import torch

        from treadle.testing.attention_reference import batch_of

        size = self.page_size
        batch, _ = batch_of([size], [size], page_size=size, device=self.device)
        batch.page_table.zero_()
        batch.slot_mapping = torch.arange(size, device=self.device)
        k = self.keys[0].new_full((size, *self.keys[0].shape[1:]), float("nan"))
        q = k.new_zeros(size, self.request.num_heads, self.request.head_size)
        batch.num_decodes = int(size == 1)
        backend.forward(q, k, k, cache, backend.build_metadata(batch))

    def release(self, window: int) -> None:
        """Give back the pages that no query of the step sees any more."""
        rows = zip(self.query_lens, self.kv_lens, strict=True)
        for row, (count, tokens) in enumerate(rows):
            self.batch.page_table[row, : max(0, tokens - count + 1 - window) // self.page_size] = 0

    @property
    def q(self) -> Tensor:
        import torch

        return torch.cat(self.queries)

    @property
    def k(self) -> Tensor:
        return self._new(self.keys)

    @property
    def v(self) -> Tensor:
        return self._new(self.values)

    def _new(self, parts: list[Tensor]) -> Tensor:
        import torch

        return torch.cat([x[len(x) - n :] for x, n in zip(parts, self.query_lens, strict=True)])

    def expected(self) -> Tensor:
        import torch

        from treadle.testing.attention_reference import attend

        request = self.request
        rows = zip(self.queries, self.keys, self.values, strict=True)
        return torch.cat(
            [
                attend(
                    *(x.float() for x in row),
                    scale=request.scale,
                    mask=request.mask,
                    window=request.window,
                    softcap=request.softcap,
                    **self.options,
                )
                for row in rows
            ]
        )

    def check(self, out: Tensor, label: str = "") -> None:
        import torch

        assert out.dtype == self.dtype and out.shape == self.q.shape
        expected, actual = self.expected(), out.float()
        assert torch.isfinite(actual).all(), f"{label}: not finite, or not written"
        error = float((actual - expected).norm() / expected.norm())
        limit = max(_TOLERANCE[self.request.dtype], _TOLERANCE[self.request.kv_dtype])
        assert error <= limit, f"{label}: relative error {error:.2e} is over {limit:.0e}"


def _storage(name: str) -> torch.dtype:
    import torch

    fp8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    return fp8.get(name) or getattr(torch, name)


class AttentionSuite(PluginTest):
    """Subclass it with ``plugin`` and ``device``; its name must begin with ``Test``."""

    device: ClassVar[DeviceInfo] = DeviceInfo("cpu")
    steps: ClassVar[Mapping[str, tuple[list[int], list[int]]]] = steps
    """Query and key lengths of the steps to run every request with; fewer where each is slow."""

    def offer_or_refusal(self, request: AttentionRequest) -> AttentionOffer | Refusal:
        """The backend's answer, or what it raised: for an engine that would be a refusal. Override
        it for a backend that is not installed."""
        plugins = self._cached_plugins
        hooks: Any = plugins.hooks_for("attention_backends", self.key)
        options = plugins.options("attention_backends", self.key)
        answers: list[AttentionOffer | Refusal] = hooks.treadle_attention_backend(
            request=request, options=options
        )
        return next(answer for answer in answers if answer.name == self.key)

    @cached_property
    def _cached_plugins(self) -> PluginManager:
        return self.plugin_manager()

    def offer(self, name: str) -> tuple[AttentionRequest, AttentionOffer]:
        request = replace(requests[name], device=self.device)
        answer = self.offer_or_refusal(request)
        if isinstance(answer, Refusal):
            pytest.skip("; ".join(answer.reasons))
        return request, answer

    def step(
        self, request: AttentionRequest, step: str, page_size: int, seed: int = 0
    ) -> AttentionCase:
        return AttentionCase(
            request, *{**steps, **self.steps}[step], page_size, device=self.device.type, seed=seed
        )

    @pytest.mark.parametrize("name", [*requests, *_UNUSUAL_REQUESTS])
    def test_an_answer_is_an_offer_or_says_why_not(self, name: str) -> None:
        request = {**requests, **_UNUSUAL_REQUESTS}[name]
        if name not in ("unknown device", "old device"):
            request = replace(request, device=self.device)
        answer = self.offer_or_refusal(request)
        if isinstance(answer, Refusal):
            assert answer.reasons and all(reason.strip() for reason in answer.reasons)
        else:
            assert 0 <= answer.score <= 100
            assert answer.page_sizes and all(n > 0 for n in answer.page_sizes)
            assert request.page_size is None or request.page_size in answer.page_sizes

    @pytest.mark.parametrize("name", list(requests))
    def test_every_step_is_what_the_reference_says(self, name: str) -> None:
        request, offer = self.offer(name)
        backend = offer.create()
        for seed, step in enumerate(self.steps):
            case = self.step(request, step, offer.page_sizes[0], seed)
            cache = case.cache(backend)
            plan = backend.build_metadata(case.batch)
            output = backend.forward(case.q, case.k, case.v, cache, plan, **case.options)
            case.check(output, step)

    @pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
    def test_a_cache_in_fp8_has_scales(self, name: str) -> None:
        """Without theirs, these keys would all be cut off, and these values be zero."""
        request, offer = self.offer(name)
        scales = (50000.0, 1 / 50000)
        request = replace(request, scale=request.scale / scales[0])
        answer = self.offer_or_refusal(request)
        assert isinstance(answer, AttentionOffer)
        backend = answer.create()
        for seed, step in enumerate(self.steps):
            lengths = {**steps, **self.steps}[step]
            options: dict[str, Any] = {"device": self.device.type, "seed": seed, "scales": scales}
            case = AttentionCase(request, *lengths, offer.page_sizes[0], **options)
            cache, plan = case.cache(backend), backend.build_metadata(case.batch)
            case.check(backend.forward(case.q, case.k, case.v, cache, plan, scales), step)
            output = backend.forward(case.q, None, None, cache, plan, scales)
            case.check(output, f"{step}, written before")

    def test_every_page_size_that_it_offers(self) -> None:
        request, offer = self.offer("float32")
        for page_size in offer.page_sizes:
            answer = self.offer_or_refusal(replace(request, page_size=page_size))
            assert isinstance(answer, AttentionOffer), f"offers and refuses pages of {page_size}"
            backend = answer.create()
            case = self.step(request, "mixed", page_size)
            cache = case.cache(backend)
            out = backend.forward(case.q, case.k, case.v, cache, backend.build_metadata(case.batch))
            case.check(out, f"pages of {page_size}")

    def test_tokens_may_have_been_written_already(self) -> None:
        request, offer = self.offer("float32")
        backend = offer.create()
        case = self.step(request, "mixed", offer.page_sizes[0])
        cache, plan = case.cache(backend), backend.build_metadata(case.batch)
        backend.forward(case.q, case.k, case.v, cache, plan)
        case.check(backend.forward(case.q, None, None, cache, plan))

    @pytest.mark.parametrize("name", ["float32", "narrow window", "wide window"])
    def test_page_0_never_matters(self, name: str) -> None:
        """It pads page tables and stands for pages that a window has left behind (docs/adr/0007)."""
        request, offer = self.offer(name)
        backend = offer.create()
        for step in ("decodes", "mixed", "chunk"):
            if step not in self.steps:
                continue
            case = self.step(request, step, offer.page_sizes[-1])
            cache = case.cache(backend)
            case.poison(backend, cache)
            if request.window is not None:
                case.release(request.window)
            out = backend.forward(case.q, case.k, case.v, cache, backend.build_metadata(case.batch))
            case.check(out, step)

    def test_slices_of_one_projection_will_do(self) -> None:
        """Models split one fused output; the slices are not contiguous."""
        import torch

        request, offer = self.offer("float32")
        backend = offer.create()
        for step in ("decodes", "prompts", "mixed"):
            case = self.step(request, step, offer.page_sizes[0])
            fused = torch.cat([x.flatten(1) for x in (case.q, case.k, case.v)], dim=1)
            kv = request.num_kv_heads * request.head_size
            parts = torch.split(fused, [request.num_heads * request.head_size, kv, kv], dim=1)
            q, k, v = (x.unflatten(1, (-1, request.head_size)) for x in parts)
            cache = case.cache(backend)
            case.check(backend.forward(q, k, v, cache, backend.build_metadata(case.batch)), step)

    def test_one_plan_serves_every_layer(self) -> None:
        request, offer = self.offer("float32")
        backend = offer.create()
        layers = [self.step(request, "mixed", offer.page_sizes[0]) for _ in range(2)]
        layers[1].values = [-x for x in layers[1].values]
        caches = [layer.cache(backend) for layer in layers]
        plan = backend.build_metadata(layers[0].batch)
        for _ in range(2):
            for layer, kv in zip(layers, caches, strict=True):
                layer.check(backend.forward(layer.q, layer.k, layer.v, kv, plan))

    def test_two_plans_do_not_meet(self) -> None:
        """A step has a plan for each group of layers, and all are made before the layers run."""
        request, offer = self.offer("float32")
        backend = offer.create()
        cases = [self.step(request, step, offer.page_sizes[0]) for step in ("decodes", "mixed")]
        caches = [case.cache(backend) for case in cases]
        plans = [backend.build_metadata(case.batch) for case in cases]
        for case, cache, plan in zip(cases, caches, plans, strict=True):
            case.check(backend.forward(case.q, case.k, case.v, cache, plan))

    def test_a_result_is_written_where_the_caller_says(self) -> None:
        """If it is a ``SupportsOutputBuffer``."""
        import torch

        request, offer = self.offer("float32")
        backend: Any = offer.create()
        target: object = backend
        if not isinstance(target, SupportsOutputBuffer):
            pytest.skip("it makes a tensor of its own")
        for step in ("decodes", "mixed"):
            case = self.step(request, step, offer.page_sizes[0])
            cache, plan = case.cache(backend), backend.build_metadata(case.batch)
            out = torch.full_like(case.q, torch.nan)
            target.forward_into(out, case.q, case.k, case.v, cache, plan)
            case.check(out)

    def test_its_slots_are_where_tokens_lie(self) -> None:
        """Others write there, as it would have, if it is a ``SupportsExternalKVWrite``."""
        import torch

        request, offer = self.offer("float32")
        backend: Any = offer.create()
        paged: object = backend
        if not isinstance(paged, SupportsExternalKVWrite):
            pytest.skip("it lets nobody else write")
        for step in ("decodes", "mixed"):
            case = self.step(request, step, offer.page_sizes[0])
            cache, plan = case.cache(backend), backend.build_metadata(case.batch)
            backend.forward(case.q, case.k, case.v, cache, plan)
            slots = paged.slot_mapping(plan)
            for half, expected in zip(cache, (case.k, case.v), strict=True):
                assert torch.equal(half.flatten(0, 1)[slots], expected), step

    def test_a_row_does_not_depend_on_the_others(self) -> None:
        import torch

        request, offer = self.offer("float32")
        backend = offer.create()
        case = self.step(request, "decodes", offer.page_sizes[0])
        cache = case.cache(backend)
        out = backend.forward(case.q, case.k, case.v, cache, backend.build_metadata(case.batch))
        start = 0
        for row, (count, tokens) in enumerate(zip(case.query_lens, case.kv_lens, strict=True)):
            alone = AttentionCase(request, [count], [tokens], case.page_size, device=case.device)
            inputs = case.queries, case.keys, case.values
            alone.queries, alone.keys, alone.values = ([x[row]] for x in inputs)
            cache, plan = alone.cache(backend), backend.build_metadata(alone.batch)
            actual = backend.forward(alone.q, alone.k, alone.v, cache, plan)
            # Splitting a row differently may round differently, and tf32 is coarse.
            torch.testing.assert_close(actual, out[start : start + count], rtol=2e-3, atol=2e-3)
            start += count

    def test_a_graph_safe_plan_reads_the_device_only(self) -> None:
        """A captured step is replayed with other lengths and pages; only the bounds stay."""
        request, offer = self.offer("float32")
        if not offer.graph_safe:
            pytest.skip("does not say graph_safe")
        backend = offer.create()
        max_case = AttentionCase(
            request, [1] * 4, [90, 64, 33, 80], offer.page_sizes[0], device=self.device.type
        )
        static = max_case.batch
        plan = backend.build_metadata(static)
        backend.forward(max_case.q, max_case.k, max_case.v, max_case.cache(backend), plan)
        static.query_lens_cpu, static.seq_lens_cpu = (), ()
        for seed, lengths in enumerate(([1, 2, 17, 90], [64, 64, 5, 33], [90, 90, 90, 90])):
            case = AttentionCase(
                request, [1] * 4, lengths, max_case.page_size, device=self.device.type, seed=seed
            )
            cache = case.cache(backend)
            static.seq_lens.copy_(case.batch.seq_lens)
            static.slot_mapping.copy_(case.batch.slot_mapping)
            columns = min(static.page_table.shape[1], case.batch.page_table.shape[1])
            static.page_table.zero_()
            static.page_table[:, :columns] = case.batch.page_table[:, :columns]
            case.check(backend.forward(case.q, case.k, case.v, cache, plan), str(lengths))
