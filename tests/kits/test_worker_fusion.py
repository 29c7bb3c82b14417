"""Which kernels run in a forward pass, and in which order, if every operation is offered; and the report.

The sequences were recorded before fusions were declared, and have not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.api.attention import KernelOffer, KernelRequest
from treadle.api.cache import DeviceInfo
from treadle.api.communicators import Communicator
from treadle.api.kinds import QUANTIZATION
from treadle.plugins import PluginManager
from treadle.testing.attention_reference import ReferenceBackend
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.kernel_ops import COMMUNICATOR_OPS, KERNEL_OPS
from treadle.testing.models import TinyModel
from treadle.testing.packing import AwqFormat, Format, Fp8Format, GptqFormat, pack_checkpoint
from treadle.testing.ranks import run_on_ranks
from treadle_worker_kit.fusion import FusionReport, apply_fusions

CPU = DeviceInfo("cpu")
IDS = torch.arange(40, 53)
FP8 = torch.float8_e4m3fn


class Paged(ReferenceBackend):
    """Lets others write its cache."""

    def slot_mapping(self, plan: Any) -> Tensor:
        mapping: Tensor = plan.slot_mapping
        return mapping


class EveryKernel:
    """A plugin that offers every operation, by its reference, and records the ``calls``."""

    def __init__(self, without: Sequence[str] = (), calls: list[str] | None = None) -> None:
        self.without = without
        self.calls = [] if calls is None else calls

    def kernel(self, op: str, request: KernelRequest) -> KernelOffer | None:
        if op in self.without:
            return None
        called = " ".join([op, *map(str, request.shape.values())])

        def kernel(*args: Any) -> Any:
            self.calls.append(called)
            if op == "linear_split_k" and args[2] is None:
                pieces = zip(args[0].tensor_split(2, 1), args[1].tensor_split(2, 1), strict=True)
                return torch.stack([torch.nn.functional.linear(*p).float() for p in pieces])
            return KERNEL_OPS[op].reference(*args)

        return KernelOffer("mine", 1, lambda: kernel)


class Fusing:
    """A communicator that has every fused operation, by its reference, and records its calls."""

    name, memory_bytes = "between", 0

    def __init__(self, base: Communicator) -> None:
        self._base = base
        self.rank, self.world_size = base.rank, base.world_size
        self.all_gather, self.all_reduce_min = base.all_gather, base.all_reduce_min
        self.calls: list[str] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls.append("all_reduce")
        return self._base.all_reduce(x)

    def create_fused_op(self, op: str, size: int, dtype: torch.dtype) -> Any:
        declared = COMMUNICATOR_OPS[op]

        def kernel(*args: Any) -> Any:
            self.calls.append(op)
            return declared.reference(self._base, *args)

        return SimpleNamespace(run=kernel)


class OnCuda:
    """Quantizes as for a CUDA device, whose layouts kernels read."""

    def __init__(self) -> None:
        self._host = PluginManager()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def create_guarded(self, kind: Any, key: str, **arguments: Any) -> Any:
        if kind is QUANTIZATION:
            arguments["device"] = DeviceInfo("cuda", (8, 0))
        return self._host.create_guarded(kind, key, **arguments)


def run_fused(
    folder: Path,
    *,
    plugins: Any = None,
    communicator: Fusing | None = None,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    backend: type[ReferenceBackend] = Paged,
    without: Sequence[str] = (),
    logits_indices: Tensor | None = None,
) -> tuple[list[str], FusionReport]:
    """The kernels that a forward pass calls, after its results were compared with those without."""
    tiny = TinyModel(folder, plugins or PluginManager(), tp_group=communicator, dtype=dtype)
    for layer in tiny.attentions:
        layer.backend = backend(layer.backend.request)  # type: ignore[attr-defined]
    clear = tiny._clear

    def cleared(totals: Sequence[int]) -> None:
        clear(totals)
        for layer in tiny.attentions:
            layer.cache = layer.cache.to(cache or layer.cache.dtype)

    tiny._clear = cleared  # type: ignore[method-assign]
    expected = tiny.logits(IDS, logits_indices=logits_indices)
    plugin = EveryKernel(without, communicator.calls if communicator else None)
    report = apply_fusions(tiny.model, plugin.kernel, CPU, str(dtype).removeprefix("torch."))
    plugin.calls.clear()
    actual = tiny.logits(IDS, logits_indices=logits_indices)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    return plugin.calls, report


QKV, ROPE = "linear 64 128", "rope_and_cache 4 2 16"
OUT, OUT_SPLIT = "linear 64 64", "linear_split_k 64 64"
GATED, DOWN, DOWN_SPLIT = "linear_silu_and_mul 64 192", "linear 96 64", "linear_split_k 96 64"
NORM, ADD, ADD_SPLIT = "rms_norm 64", "fused_add_rms_norm 64", "fused_add_partials_rms_norm 64"
HEAD = "linear 64 320"
SPLIT = [QKV, ROPE, OUT_SPLIT, ADD_SPLIT, GATED, DOWN_SPLIT, ADD_SPLIT]
SPLIT_LAST = [QKV, ROPE, OUT, ADD, GATED, DOWN_SPLIT, ADD_SPLIT]
WHOLE = [QKV, ROPE, OUT, ADD, GATED, DOWN, ADD]
UP = "linear 64 192"


def replace_calls(calls: list[str], *pairs: tuple[str, Sequence[str]]) -> list[str]:
    """``calls`` with some of them replaced by others."""
    changed = dict(pairs)
    return [new for call in calls for new in changed.get(call, [call])]


USUAL = [NORM, *SPLIT, *SPLIT, *SPLIT_LAST, HEAD]
GEMMA2 = [QKV, ROPE, OUT, NORM, ADD, UP, DOWN, NORM, ADD]
FUSED = ["fused_experts 64 96", "silu_and_mul 96"]
EXPERTS = ["linear 64 4", "topk_softmax 4 2", *FUSED, "combine_experts 64"]
MIXTURE = [QKV, ROPE, OUT_SPLIT, ADD_SPLIT, *EXPERTS, ADD]
MIXTURE_LAST = [QKV, ROPE, OUT, ADD, *EXPERTS, ADD]
BIAS = {"attention_bias": True, "mlp_bias": True}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "mlp_only_layers": [1],
}


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("LlamaForCausalLM", {}, USUAL),
        ("LlamaForCausalLM", BIAS, [NORM, *WHOLE * 3, HEAD]),
        ("Qwen2ForCausalLM", {}, USUAL),
        ("Qwen3ForCausalLM", {}, USUAL),
        ("GemmaForCausalLM", {}, replace_calls(USUAL, (GATED, [UP]))),
        ("Gemma2ForCausalLM", {}, [NORM, *GEMMA2 * 3, HEAD]),
        ("Gemma3ForCausalLM", {}, [NORM, *GEMMA2 * 3, HEAD]),
        (
            "MixtralForCausalLM",
            {"num_local_experts": 4},
            [NORM, *MIXTURE * 2, *MIXTURE_LAST, HEAD],
        ),
        ("Qwen3MoeForCausalLM", MOE, [NORM, *MIXTURE, *SPLIT, *MIXTURE_LAST, HEAD]),
    ],
)
def test_models(
    architecture: str, changes: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, architecture, seed=1, **changes)
    assert run_fused(folder)[0] == expected
    assert run_fused(folder, logits_indices=torch.tensor([4, 12]))[0] == expected


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", seed=1)


def test_an_fp8_cache(llama: Path) -> None:
    calls, _ = run_fused(llama, cache=FP8, without=("linear_split_k", "linear_silu_and_mul"))
    expected = replace_calls(
        [NORM, *WHOLE * 3, HEAD],
        (ROPE, ["rope_and_cache_fp8 4 2 16"]),
        (GATED, [UP, "silu_and_mul 96"]),
    )
    assert calls == expected


def test_a_backend_that_writes_its_own_cache(llama: Path) -> None:
    calls, report = run_fused(llama, backend=ReferenceBackend)
    assert calls == replace_calls(USUAL, (ROPE, []))
    paths = [f"model.layers.{index}.self_attn" for index in range(3)]
    reason = "the attention backend writes its cache itself"
    assert report.separate["rope_and_cache"] == {reason: paths}


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("linear_silu_and_mul", replace_calls(USUAL, (GATED, [UP, "silu_and_mul 96"]))),
        ("linear_split_k", [NORM, *WHOLE * 3, HEAD]),
        ("fused_add_partials_rms_norm", [NORM, *WHOLE * 3, HEAD]),
        ("rope_and_cache", replace_calls(USUAL, (ROPE, []))),
    ],
)
def test_what_is_not_offered(llama: Path, missing: str, expected: list[str]) -> None:
    calls, report = run_fused(llama, without=(missing,))
    assert calls == expected
    fusion = next(name for name in report.separate if missing in name)
    assert f"no kernel is offered for {missing}" in report.separate[fusion]
    assert fusion not in report.fused


@pytest.mark.parametrize("format", [AwqFormat(32), GptqFormat(group_size=32)])
def test_four_bit_weights(format: Format, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    source = make_checkpoint(
        tmp_path / "source", "LlamaForCausalLM", seed=1, dtype=torch.bfloat16, **sizes
    )
    pack_checkpoint(source, tmp_path / "packed", tmp_path / "plain", format)
    calls, _ = run_fused(tmp_path / "packed", plugins=OnCuda(), dtype=torch.bfloat16)
    add = "fused_add_rms_norm 128"
    layer = [
        "int4_linear 128 256 32", "int4_linear 128 128 32", add,
        "int4_linear_silu_and_mul 128 512 32", "int4_linear 256 128 32", add,
    ]  # fmt: skip
    assert calls == ["rms_norm 128", *layer * 3]


def test_fp8_weights(tmp_path: Path) -> None:
    """Their method computes the activation itself."""
    source = make_checkpoint(tmp_path / "source", "LlamaForCausalLM", seed=1)
    pack_checkpoint(source, tmp_path / "packed", tmp_path / "plain", Fp8Format("channel"))
    calls, report = run_fused(tmp_path / "packed")
    assert calls == [NORM, *[ROPE, ADD, ADD] * 3, HEAD]
    assert "gate_up_proj is quantized" in report.separate["linear_silu_and_mul"]


HALF = {
    QKV: "linear 64 64", ROPE: "rope_and_cache 2 1 16", OUT: "linear 32 64",
    GATED: "linear_silu_and_mul 64 96", UP: "linear 64 96", DOWN: "linear 48 64",
    HEAD: "linear 64 192", "silu_and_mul 96": "silu_and_mul 48", "fused_experts 64 96": "fused_experts 64 48",
}  # fmt: skip
SUMMED = "all_reduce_add_rms_norm"


@pytest.mark.parametrize(
    ("architecture", "changes", "layer"),
    [
        ("LlamaForCausalLM", {}, [QKV, ROPE, OUT, SUMMED, GATED, DOWN, SUMMED]),
        ("Qwen3ForCausalLM", {}, [QKV, ROPE, OUT, SUMMED, GATED, DOWN, SUMMED]),
        (
            "Gemma2ForCausalLM",
            {},
            [QKV, ROPE, OUT, "all_reduce", NORM, ADD, UP, DOWN, "all_reduce", NORM, ADD],
        ),
        (
            "MixtralForCausalLM",
            {"num_local_experts": 4},
            [QKV, ROPE, OUT, SUMMED, *EXPERTS, "all_reduce", ADD],
        ),
    ],
)
def test_two_ranks(
    architecture: str, changes: dict[str, Any], layer: list[str], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, architecture, seed=1, **changes)
    expected = ["all_reduce", NORM, *layer * 3, HEAD, "all_gather"]
    expected = [HALF.get(call, call) for call in expected]
    for calls, report in run_on_ranks(2, lambda base: run_fused(folder, communicator=Fusing(base))):
        assert calls == expected
        assert report.backends["all_gather"] == "between"
        assert (SUMMED in report.backends) == (SUMMED in layer)


def test_the_report(llama: Path) -> None:
    _, report = run_fused(llama)
    kernels, *fused = report.lines()
    assert kernels.startswith("Kernels: rms_norm by mine, fused_add_rms_norm by mine, ")
    assert fused == [
        "Fused: fused_add_partials_rms_norm + linear_split_k at 5 places; not at "
        "model.layers.2.self_attn.o_proj: the last layer selects rows before the norm.",
        "Fused: rope_and_cache at 3 places.",
        "Fused: linear_silu_and_mul at 3 places.",
    ]
    assert list(FusionReport().lines()) == []
