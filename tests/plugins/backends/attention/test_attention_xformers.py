"""The xformers backend without a GPU: its offers, and its decode in Triton's interpreter."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from treadle_attention_xformers import HEAD_SIZES, PAGE_SIZES, treadle_attention_backend

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

HOPPER = DeviceInfo("cuda", (9, 0))
QWEN = AttentionRequest(HOPPER, "bfloat16", "bfloat16", 128, 16, 8, 128**-0.5)
HERE = Path(__file__).parent
GOOD = {"xformers": "0.0.35", "triton": "3.6.0"}

needs_xformers = pytest.mark.skipif(
    find_spec("xformers") is None or find_spec("triton") is None,
    reason="needs xformers and triton",
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of the distributions that the offer depends on; what is not in it is not installed."""
    versions = dict(GOOD)

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    return versions


def refusal(**changes: Any) -> tuple[str, ...]:
    offer = treadle_attention_backend(replace(QWEN, **changes), {})
    assert isinstance(offer, Refusal) and offer.name == "xformers"
    return offer.reasons


# ------------------------------------------------------------------------------- the offer


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_it_offers_from_capability_8_on(capability: tuple[int, int]) -> None:
    offer = treadle_attention_backend(replace(QWEN, device=DeviceInfo("cuda", capability)), {})
    assert isinstance(offer, AttentionOffer)
    assert 10 < offer.score < 80, "plain torch offers 10 on CUDA, the Triton kernels 80"
    assert offer.graph_safe and offer.page_sizes == PAGE_SIZES


@pytest.mark.usefixtures("installed")
def test_what_it_serves() -> None:
    served: list[dict[str, Any]] = [
        {"dtype": "float16", "kv_dtype": "float16"},
        {"kv_dtype": "auto"},
        {"mask": MaskKind.BIDIRECTIONAL},
        {"num_heads": 7, "num_kv_heads": 1},
        *({"head_size": size} for size in HEAD_SIZES),
        *({"page_size": size} for size in PAGE_SIZES),
    ]
    for changes in served:
        assert isinstance(
            treadle_attention_backend(replace(QWEN, **changes), {}), AttentionOffer
        ), changes


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": DeviceInfo("cpu")}, "device 'cpu' is not CUDA"),
        ({"device": DeviceInfo("cuda", (7, 5))}, "capability 7.5 is below 8.0"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "dtype float32"),
        ({"kv_dtype": "fp8_e4m3"}, "kv_dtype fp8_e4m3 is not bfloat16"),
        ({"kv_dtype": "float16"}, "kv_dtype float16 is not bfloat16"),
        ({"head_size": 80}, "head size 80"),
        ({"head_size": 512}, "head size 512"),
        ({"num_heads": 7}, "7 query heads cannot share 8"),
        ({"num_kv_heads": 0}, "cannot share 0"),
        ({"page_size": 8}, "page size 8"),
        ({"page_size": 48}, "page size 48"),
        ({"window": 4096}, "sliding windows"),
        ({"mask": MaskKind.TREE}, "mask tree"),
        ({"mask": MaskKind.PREFIX}, "mask prefix"),
        ({"softcap": 50.0}, "soft cap"),
        ({"sinks": True}, "sinks"),
        ({"latent": True}, "latent"),
    ],
)
def test_it_refuses_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    (message,) = refusal(**changes)
    assert reason in message


@pytest.mark.usefixtures("installed")
def test_it_says_every_reason() -> None:
    window = {"mask": MaskKind.SLIDING, "window": 4096}
    assert len(refusal(head_size=100, num_heads=7, page_size=48, softcap=30.0, **window)) == 6


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"xformers": None}, "pip install 'xformers>=0.0.35,<0.0.36'"),
        ({"xformers": "0.0.34"}, "xformers 0.0.34 is not 0.0.35"),
        ({"xformers": "0.1.0+cu130"}, "xformers 0.1.0 is not 0.0.35"),
        ({"triton": None}, "triton is not installed"),
        ({"triton": "3.9.0"}, "triton 3.9.0 has no block pointers"),
        ({"triton": "4.0.0"}, "triton 4.0.0 has no block pointers"),
        ({"flash_attn": "2.6.3"}, "flash_attn 2.6.3"),
        ({"flash_attn": "2.9.0"}, "flash_attn 2.9.0"),
    ],
)
def test_what_must_be_installed(
    installed: dict[str, str], changes: dict[str, str | None], reason: str
) -> None:
    installed |= {name: text for name, text in changes.items() if text}
    for name, text in changes.items():
        if text is None:
            del installed[name]
    (message,) = refusal()
    assert reason in message


def test_what_may_be_installed(installed: dict[str, str]) -> None:
    installed |= {"xformers": "0.0.35.post1", "triton": "3.8.1", "flash_attn": "2.8.3.post2"}
    assert isinstance(treadle_attention_backend(QWEN, {}), AttentionOffer)


def test_a_bid_imports_nothing(imported_by_bid: Callable[..., set[str]]) -> None:
    """xformers is imported when the backend is made: asking costs an unpinned start nothing."""
    modules = imported_by_bid("treadle_attention_xformers", QWEN)
    assert modules.isdisjoint({"torch", "triton", "xformers"})


def test_a_pin_that_cannot_be_served_says_why(answers: Callable[..., list[str]]) -> None:
    with pytest.raises(ConfigError, match=r"'xformers', which cannot serve .* is not CUDA"):
        answers("xformers", device="cpu", cpu_threads=1)


# -------------------------------------------------------------------------- the operators


@pytest.mark.slow
@needs_xformers
def test_decode_in_the_interpreter() -> None:
    """All of interpreted_attention_xformers.py, in a process whose Triton interprets."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    # Warnings are xformers' own: of what Triton deprecates, and of numpy, which interprets.
    command += ["-W", "ignore", str(HERE / "interpreted_attention_xformers.py")]
    variables = {"TRITON_INTERPRET": "1", "XFORMERS_ENABLE_TRITON": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    assert " passed" in process.stdout


# -------------------------------------------------------------------------------- a card

on_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # xformers' own: of what torch and Triton deprecate
    needs_xformers,
]


def card() -> DeviceInfo:
    return DeviceInfo("cuda", torch.cuda.get_device_capability())


class TestOnCuda(AttentionSuite):
    pytestmark = on_cuda
    key = "xformers"
    device = card() if torch.cuda.is_available() else HOPPER
    steps = {name: steps[name] for name in ("prompts", "prefix hit", "mixed")}  # compiling is slow

    def offer_or_refusal(self, request: AttentionRequest) -> AttentionOffer | Refusal:
        return treadle_attention_backend(request, {})

    def offer(self, name: str) -> tuple[AttentionRequest, AttentionOffer]:
        """What the suite asks for in float32, which stands for any type there, in float16."""
        request = replace(requests[name], device=self.device)
        if request.dtype == request.kv_dtype == "float32":
            request = replace(request, dtype="float16", kv_dtype="float16")
        offer = self.offer_or_refusal(request)
        if isinstance(offer, Refusal):
            pytest.skip("; ".join(offer.reasons))
        return request, offer

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_long_rows(self, dtype: str) -> None:
        """Of many pages, so that decode is split and joined, at the size of Qwen3-8B."""
        request = replace(
            QWEN, device=self.device, dtype=dtype, kv_dtype=dtype, num_heads=32, num_kv_heads=8
        )
        offer = self.offer_or_refusal(request)
        assert isinstance(offer, AttentionOffer)
        backend = offer.create()
        case = AttentionCase(
            request, [1] * 5 + [300, 513], [1, 64, 700, 4096, 1023, 1500, 513], 64, device="cuda"
        )
        cache = case.cache(backend)
        cache[cache == 7.0] = float("nan")  # what nobody has written
        case.check(
            backend.forward(case.q, case.k, case.v, cache, backend.build_metadata(case.batch))
        )

    def test_a_captured_step_replays_with_other_lengths(
        self, replayed: Callable[[AttentionBackend, AttentionRequest], None]
    ) -> None:
        request, offer = self.offer("float16")
        replayed(offer.create(), request)

    def test_an_engine_answers_as_with_torch_alone(self, answers: Callable[..., list[str]]) -> None:
        """Prefill, decode in captured graphs, and both in one step, over three requests."""
        if not {"treadle-attention-xformers", "treadle-demo"} <= {
            entry.dist for entry in PluginManager().entries
        }:
            pytest.skip("needs both plugins installed, not only importable")
        texts = answers("xformers", device="cuda", dtype="float16")
        assert texts == answers("sdpa", device="cuda", dtype="float16")
        assert all(texts)
