"""The FlashInfer backend without a GPU: its offers, and what it plans, over kernels in plain torch."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import treadle_attention_flashinfer
from treadle_attention_flashinfer import HEAD_SIZES, PAGE_SIZES, has_xqa, treadle_attention_backend
from treadle_attention_flashinfer.page_indices import build_page_indices, windowed_page_table

from treadle.api.attention import (
    AttentionBackend,
    AttentionOffer,
    AttentionRequest,
    MaskKind,
    Refusal,
)
from treadle.api.cache import DeviceInfo
from treadle.errors import ConfigError
from treadle.plugins import PluginManager
from treadle.testing.attention import AttentionCase, AttentionSuite, requests, steps
from treadle.testing.attention_reference import batch_of

HOPPER = DeviceInfo("cuda", (9, 0))
QWEN = AttentionRequest(HOPPER, "bfloat16", "bfloat16", 128, 16, 8, 128**-0.5)
INSTALL = "pip install flashinfer-python"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the backend sees as installed, distributions and programs; what is not in it is not there."""
    versions = {"flashinfer-python": "0.7.2", "nvcc": "/bin/nvcc", "ninja": "/bin/ninja"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(treadle_attention_flashinfer, "which", versions.get)
    monkeypatch.setattr(treadle_attention_flashinfer, "_NVCC", Path("/nowhere/nvcc"))
    return versions


def refusal(**changes: Any) -> tuple[str, ...]:
    offer = treadle_attention_backend(replace(QWEN, **changes), {})
    assert isinstance(offer, Refusal) and offer.name == "flashinfer"
    return offer.reasons


def offered(**changes: Any) -> AttentionOffer:
    offer = treadle_attention_backend(replace(QWEN, **changes), {})
    assert isinstance(offer, AttentionOffer), offer
    return offer


# ------------------------------------------------------------------------------- the offer


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3), (12, 0)])
def test_it_offers_captured_decode_where_xqa_runs(capability: tuple[int, int]) -> None:
    offer = offered(device=DeviceInfo("cuda", capability))
    assert 40 < offer.score < 80, "xformers offers 40, the Triton kernels 80"
    assert offer.graph_safe and offer.page_sizes == PAGE_SIZES


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "changes",
    [
        {"device": DeviceInfo("cuda", (8, 0))},
        {"device": DeviceInfo("cuda", (8, 9))},
        {"device": DeviceInfo("cuda", (11, 0))},
        {"softcap": 50.0},
        {"kv_dtype": "fp8_e5m2"},
        {"num_heads": 64, "num_kv_heads": 1},
    ],
)
def test_its_score_is_lower_where_steps_are_planned_on_the_host(changes: dict[str, Any]) -> None:
    offer = offered(**changes)
    assert 10 < offer.score < 40 and not offer.graph_safe


@pytest.mark.usefixtures("installed")
def test_what_it_serves() -> None:
    served: list[dict[str, Any]] = [
        {"dtype": "float16", "kv_dtype": "float16"},
        {"kv_dtype": "auto"},
        {"kv_dtype": "fp8_e4m3"},
        {"mask": MaskKind.BIDIRECTIONAL},
        {"mask": MaskKind.SLIDING, "window": 4096},
        {"num_heads": 7, "num_kv_heads": 1},
        *({"head_size": size} for size in HEAD_SIZES),
        *({"page_size": size} for size in PAGE_SIZES),
    ]
    for changes in served:
        assert offered(**changes).graph_safe, changes


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": DeviceInfo("cpu")}, "device 'cpu' is not CUDA"),
        ({"device": DeviceInfo("cuda", (7, 5))}, "capability 7.5 is below 8.0"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "dtype float32"),
        ({"kv_dtype": "float16"}, "kv_dtype float16 is neither bfloat16 nor fp8"),
        (
            {"kv_dtype": "fp8_e4m3", "device": DeviceInfo("cuda", (8, 6))},
            "fp8_e4m3 needs capability 8.9, this is 8.6",
        ),
        ({"head_size": 80}, "head size 80"),
        ({"head_size": 512}, "head size 512"),
        ({"num_heads": 7}, "7 query heads cannot share 8"),
        ({"num_kv_heads": 0}, "cannot share 0"),
        ({"page_size": 8}, "page size 8"),
        ({"page_size": 256}, "page size 256"),
        ({"mask": MaskKind.SLIDING}, "needs a window"),
        ({"mask": MaskKind.BIDIRECTIONAL, "window": 4}, "a window on a bidirectional mask"),
        ({"window": 0}, "window 0 is not positive"),
        ({"mask": MaskKind.TREE}, "mask tree"),
        ({"mask": MaskKind.PREFIX}, "mask prefix"),
        ({"sinks": True}, "sinks"),
        ({"latent": True}, "latent"),
    ],
)
def test_it_refuses_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    (message,) = refusal(**changes)
    assert reason in message


@pytest.mark.usefixtures("installed")
def test_it_says_every_reason() -> None:
    assert len(refusal(head_size=100, num_heads=7, page_size=48, sinks=True, window=0)) == 5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"flashinfer-python": None}, INSTALL),
        ({"flashinfer-python": "0.6.4"}, "0.6.4 is not 0.7 from 0.7.2 on"),
        ({"flashinfer-python": "0.7.1.post2"}, "0.7.1 is not 0.7"),
        ({"flashinfer-python": "0.8.0"}, "'flashinfer-python>=0.7.2,<0.8'"),
        ({"nvcc": None}, "nvcc, which is neither in PATH nor /nowhere/nvcc"),
        ({"ninja": None}, "pip install ninja"),
    ],
)
def test_what_must_be_installed(
    installed: dict[str, str], changes: dict[str, str | None], reason: str
) -> None:
    for name, text in changes.items():
        if text is None:
            del installed[name]
        else:
            installed[name] = text
    (message,) = refusal()
    assert reason in message


def test_what_may_be_installed(installed: dict[str, str]) -> None:
    installed["flashinfer-python"] = "0.7.9.post1"
    assert offered()
    del installed["nvcc"], installed["ninja"]
    installed["flashinfer-jit-cache"] = "0.7.9+cu130"
    assert offered(), "kernels that are compiled already need no compiler"


def test_a_bid_imports_nothing(imported_by_bid: Callable[..., set[str]]) -> None:
    """FlashInfer is imported when the backend is made: asking costs an unpinned start nothing."""
    modules = imported_by_bid("treadle_attention_flashinfer", QWEN)
    assert modules.isdisjoint({"torch", "flashinfer"})


def test_a_pin_that_cannot_be_served_says_why(answers: Callable[..., list[str]]) -> None:
    with pytest.raises(ConfigError, match=r"'flashinfer', which cannot serve .* is not CUDA"):
        answers("flashinfer", device="cpu", cpu_threads=1)


# -------------------------------------------------------------------------------- the pages

WINDOWS = [None, 1, 5, 16, 17, 40, 1000]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("step", list(steps))
def test_the_pages_of_a_step(step: str, window: int | None) -> None:
    """Each row gets the pages that hold what its new tokens see, in order, and their tokens."""
    query_lens, kv_lens = steps[step]
    batch, _ = batch_of(query_lens, kv_lens, page_size=16, shuffle=3, spare_columns=2)
    table = batch.page_table
    pages = build_page_indices(query_lens, kv_lens, 16, table.shape[1], window)
    numbers = table.reshape(-1)[pages.table_indices].tolist()
    starts = pages.kv_indptr.tolist()
    assert len(numbers) == starts[-1]
    assert pages.qo_indptr.tolist() == batch.query_start_loc.tolist()
    for r, (new, total) in enumerate(zip(query_lens, kv_lens, strict=True)):
        first = 0 if window is None else max(0, total - new - window + 1)  # the first token seen
        page_ids = [table[r, position // 16].item() for position in range(first, total)]
        assert numbers[starts[r] : starts[r + 1]] == list(dict.fromkeys(page_ids))
        assert pages.last_page_len[r] == total - (total - 1) // 16 * 16
        assert pages.kv_lens[r] == total - first // 16 * 16


@pytest.mark.parametrize("window", WINDOWS[1:])
def test_a_window_leaves_the_same_pages_on_the_device(window: int) -> None:
    lengths = [1, 15, 16, 17, 32, 33, 70]
    batch, _ = batch_of([1] * 7, lengths, page_size=16, shuffle=3, spare_columns=2)
    pages = build_page_indices([1] * 7, lengths, 16, batch.page_table.shape[1], window)
    table, lengths_left = windowed_page_table(batch.page_table, batch.seq_lens, 16, window)
    assert table.dtype == lengths_left.dtype == torch.int32
    assert lengths_left.tolist() == pages.kv_lens.tolist()
    assert table.shape[1] <= (window + 14) // 16 + 1
    rows = [table[r, : -(-n // 16)] for r, n in enumerate(lengths_left.tolist())]
    assert torch.equal(torch.cat(rows), batch.page_table.reshape(-1)[pages.table_indices])


# ----------------------------------------------------------------------------- every request


@contextmanager
def plain_flashinfer() -> Iterator[Any]:
    """The backend's class over kernels in plain torch, which need no GPU."""

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None: ...

    path = Path(__file__).with_name("plain_flashinfer.py")
    spec = importlib.util.spec_from_file_location("plain_flashinfer", path)
    assert spec is not None and spec.loader is not None
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    name = "treadle_attention_flashinfer.backend"
    with pytest.MonkeyPatch.context() as patch:
        for module, stand_in in plain.modules().items():
            patch.setitem(sys.modules, module, stand_in)
        patch.delitem(sys.modules, name, raising=False)
        patch.setattr(torch.cuda, "Event", Event)
        try:
            yield import_module(name).FlashInferAttention
        finally:
            del sys.modules[name]


class InSixteenBits(AttentionSuite):
    """What the suite asks for in float32, which stands for any type there, is asked in float16, and
    over pages of 16 first and last: its rows are short, and have one page of a larger size."""

    key = "flashinfer"

    def offer(self, name: str) -> tuple[AttentionRequest, AttentionOffer]:
        request = replace(requests[name], device=self.device)
        if request.dtype == request.kv_dtype == "float32":
            request = replace(request, dtype="float16", kv_dtype="float16")
        offer = self.offer_or_refusal(request)
        if isinstance(offer, Refusal):
            pytest.skip("; ".join(offer.reasons))
        return request, replace(offer, page_sizes=(*sorted(offer.page_sizes), 16))


@pytest.mark.usefixtures("installed")
class TestInPlainTorch(InSixteenBits):
    def offer_or_refusal(self, request: AttentionRequest) -> AttentionOffer | Refusal:
        offer = treadle_attention_backend(replace(request, device=HOPPER), {})
        if isinstance(offer, Refusal):
            return offer

        def create() -> AttentionBackend:
            with plain_flashinfer() as backend:
                created: AttentionBackend = backend(request, xqa=offer.graph_safe)
            return created

        return replace(offer, create=create)


@pytest.mark.usefixtures("installed")
class TestInPlainTorchWithoutXqa(TestInPlainTorch):
    """As on devices of capability 8, where the wrapper serves every row."""

    def offer_or_refusal(self, request: AttentionRequest) -> AttentionOffer | Refusal:
        offer = super().offer_or_refusal(request)
        return replace(offer, graph_safe=False) if isinstance(offer, AttentionOffer) else offer


# -------------------------------------------------------------------------------- a card

on_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs flashinfer"),
    pytest.mark.filterwarnings("ignore"),  # FlashInfer's own
]


def card() -> DeviceInfo:
    return DeviceInfo("cuda", torch.cuda.get_device_capability())


class TestOnCuda(InSixteenBits):
    pytestmark = on_cuda
    device = card() if torch.cuda.is_available() else HOPPER

    def offer_or_refusal(self, request: AttentionRequest) -> AttentionOffer | Refusal:
        return treadle_attention_backend(request, {})

    @pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
    def test_long_rows(self, kv_dtype: str) -> None:
        """Of many pages, so that decode is split and joined, at the size of Qwen3-8B."""
        request = replace(QWEN, device=self.device, kv_dtype=kv_dtype, num_heads=32)
        offer = self.offer_or_refusal(request)
        assert isinstance(offer, AttentionOffer)
        backend = offer.create()
        case = AttentionCase(
            request, [1] * 5 + [300, 513], [1, 64, 700, 4096, 1023, 1500, 513], 64, device="cuda"
        )
        cache = case.cache(backend)
        nobody = cache.float() == 7.0
        cache.masked_fill_(nobody, float("nan")) if kv_dtype == "bfloat16" else cache.view(
            torch.uint8
        ).masked_fill_(nobody, 0x7F)  # what nobody has written
        case.check(
            backend.forward(case.q, case.k, case.v, cache, backend.build_metadata(case.batch))
        )

    @pytest.mark.parametrize(
        ("window", "kv_dtype"), [(None, "bfloat16"), (200, "bfloat16"), (None, "fp8_e4m3")]
    )
    def test_a_captured_step_replays_with_other_lengths(
        self,
        window: int | None,
        kv_dtype: str,
        replayed: Callable[[AttentionBackend, AttentionRequest], None],
    ) -> None:
        request = replace(QWEN, device=self.device, window=window, kv_dtype=kv_dtype)
        if not has_xqa(request):
            pytest.skip("decode steps are not captured on this device")
        offer = self.offer_or_refusal(request)
        assert isinstance(offer, AttentionOffer)
        replayed(offer.create(), request)

    def test_an_engine_answers_as_with_torch_alone(self, answers: Callable[..., list[str]]) -> None:
        """Prefill, decode in captured graphs, and both in one step, over three requests."""
        if not {"treadle-attention-flashinfer", "treadle-demo"} <= {
            e.dist for e in PluginManager().entries
        }:
            pytest.skip("needs both plugins installed, not only importable")
        texts = answers("flashinfer", device="cuda", dtype="float16")
        assert texts == answers("sdpa", device="cuda", dtype="float16")
        assert all(texts)
