"""Layers and experts of models that the library does not run as a whole: one call for each."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from treadle_kernels_native import linears, treadle_kernel_op
from treadle_kernels_native.int4 import Int4Linear
from treadle_kernels_native.int8 import Int8Linear, RoundedLinear
from treadle_kernels_native.library import (
    LibraryError,
    instruction_sets,
    load_library,
    missing_reason,
)
from treadle_kernels_native.linears import MAX_ROWS, NativeLinears
from treadle_kernels_native.structs import InstructionSet

from treadle import LLM, SamplingParams
from treadle.api.models import LinearSpec
from treadle.api.types import DeviceInfo, KernelRequest, Refusal
from treadle.errors import ConfigError
from treadle.testing.checkpoints import make_checkpoint
from treadle_layers_kit import ops
from treadle_layers_kit.plain_experts import fused_experts

KINDS = [Int8Linear, Int4Linear]

if missing_reason() is not None and shutil.which("cc") is None:
    pytest.skip(str(missing_reason()), allow_module_level=True)


def layer(method: RoundedLinear, outputs: int, inputs: int, dtype: torch.dtype) -> nn.Module:
    module: Any = nn.Module()
    method.create_weights(module, LinearSpec("x", ("x",), inputs, (outputs,), False, dtype))
    module.weight.data.copy_(torch.randn(outputs, inputs) / inputs**0.5)
    method.process_weights_after_loading(module)
    return module  # type: ignore[no-any-return]


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_dequantized_weight(
    kind: type[RoundedLinear], dtype: torch.dtype
) -> None:
    """But for activations in eight bits. Layers have inputs of any number, the largest not first."""
    torch.manual_seed(0)
    native = NativeLinears()
    method = kind(native)
    for outputs, inputs in (96, 128), (40, 512), (300, 256):
        module = layer(method, outputs, inputs, dtype)
        bias = torch.randn(outputs).to(dtype)
        for shape in (1,), (7,), (2, 3), (0,), (MAX_ROWS + 9,):
            x = torch.randn(*shape, inputs).to(dtype)
            y = method.apply(module, x, bias)
            expected = x.float() @ method.dense(module, torch.float32).T + bias.float()
            assert y.shape == expected.shape and y.dtype == dtype
            assert not x.numel() or off(y, expected) < 0.02
        x = torch.randn(inputs, 5).to(dtype).t()  # not contiguous in its last dimension
        assert (
            off(method.apply(module, x, None), x.float() @ method.dense(module, torch.float32).T)
            < 0.02
        )


def test_a_row_does_not_depend_on_the_others() -> None:
    method = Int4Linear(NativeLinears())
    module = layer(method, 64, 256, torch.float32)
    x = torch.randn(40, 256)
    together = method.apply(module, x, None)
    alone = torch.cat([method.apply(module, row[None], None) for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_library_torch_multiplies(
    kind: type[RoundedLinear], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise LibraryError("it was not built")

    monkeypatch.setattr(linears, "load_library", missing)
    method = kind(NativeLinears())
    module = layer(method, 48, 128, torch.float32)
    x, bias = torch.randn(3, 128), torch.randn(48)
    for _ in range(3):
        expected = x @ method.dense(module, torch.float32).T + bias
        torch.testing.assert_close(method.apply(module, x, bias), expected)
    assert caplog.text.count("it was not built") == 1


def test_sizes_that_the_library_lacks_are_torchs() -> None:
    method = Int8Linear(NativeLinears())
    module = layer(method, 48, 40, torch.float32)
    x = torch.randn(3, 40)
    torch.testing.assert_close(
        method.apply(module, x, None), x @ method.dense(module, torch.float32).T
    )


def test_threads_end_with_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where more inputs need another engine."""

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    method = Int8Linear(NativeLinears())
    module, before = layer(method, 48, 64, torch.float32), threads()
    method.apply(module, torch.randn(2, 64), None)
    assert threads() == before + 2
    method.apply(layer(method, 48, 128, torch.float32), torch.randn(2, 128), None)
    assert threads() == before + 2
    del method, module
    gc.collect()
    assert threads() == before


@pytest.mark.parametrize("isa", ["generic", "i8mm"])
def test_the_instruction_set_is_the_one_of_the_option(isa: str) -> None:
    """A machine of x86-64 has no ``i8mm``, and one of aarch64 is not asked."""
    native = NativeLinears(isa)
    weight, x = torch.randn(48, 64), torch.randn(2, 64)
    if InstructionSet[isa.upper()] in instruction_sets(load_library()):
        y = native.multiply(weight, x)
        assert y is not None
        torch.testing.assert_close(y, x @ weight.T, rtol=1e-4, atol=1e-4)
        return
    with pytest.raises(ConfigError, match=f"isa .* is '{isa}', which this machine lacks"):
        native.multiply(weight, x)


def test_without_memory_torch_multiplies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10**9)
    method = Int8Linear(NativeLinears())
    module, x = layer(method, 48, 64, torch.float32), torch.randn(2, 64)
    for _ in range(2):
        expected = x @ method.dense(module, torch.float32).T
        torch.testing.assert_close(method.apply(module, x, None), expected)
    assert caplog.text.count("there is no memory") == 1


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_run_in_the_library(tmp_path: Path, quantization: str) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 4}
    make_checkpoint(
        tmp_path, "Qwen3MoeForCausalLM", num_experts_per_tok=2, mlp_only_layers=[], **sizes
    )
    calls: list[int] = []
    run = NativeLinears.run

    def counted(self: NativeLinears, module: nn.Module, x: Tensor) -> Tensor | None:
        y = run(self, module, x)
        calls.append(y is not None)
        return y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeLinears, "run", counted)
        with LLM(str(tmp_path), quantization=quantization, dtype="float32", num_pages=32) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    assert len(calls) > 20 and all(calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_in_the_type_of_the_activations(dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    request = KernelRequest(
        DeviceInfo("cpu"),
        str(dtype).removeprefix("torch."),
        {"in_features": 64, "intermediate_size": 96},
    )
    offer: Any = treadle_kernel_op("fused_experts", request, {"isa": "auto"})
    op = offer.load()
    gate_up, down = (torch.randn(6, *shape) / 8 for shape in ((192, 64), (64, 96)))
    biases: list[Any] = [torch.randn(6, 192), torch.randn(6, 64)] if has_bias else [None, None]
    for tokens in 0, 1, 9, 600:
        x, topk_ids = torch.randn(tokens, 64), torch.rand(tokens, 6).topk(2).indices
        given = [None if t is None else t.to(dtype) for t in (x, gate_up, down, *biases)]
        y = op(given[0], topk_ids, *given[1:], ops.silu_and_mul)
        inputs = [None if t is None else t.float() for t in given]
        expected = fused_experts(inputs[0], topk_ids, *inputs[1:], ops.silu_and_mul)  # type: ignore[arg-type]
        assert y.shape == expected.shape and y.dtype == dtype
        limit = 1e-5 if dtype == torch.float32 else 2e-2
        assert not tokens or off(y, expected) < limit


def test_other_sizes_are_refused() -> None:
    shape = {"in_features": 72, "intermediate_size": 40}
    answer = treadle_kernel_op(
        "fused_experts", KernelRequest(DeviceInfo("cpu"), "bfloat16", shape), {}
    )
    assert isinstance(answer, Refusal)
    assert answer.reasons == (
        "in_features 72 is not a multiple of 32",
        "intermediate_size 40 is not a multiple of 32",
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_of_experts_says_who_multiplies(tmp_path: Path, dtype: str) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 96, "num_experts": 4}
    make_checkpoint(
        tmp_path, "Qwen3MoeForCausalLM", num_experts_per_tok=2, mlp_only_layers=[], **sizes
    )
    answers = []
    for disabled in [], ["kernel_ops:native"]:
        with LLM(str(tmp_path), dtype=dtype, num_pages=32, disable_plugin=disabled) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
            outputs = llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
            said = any("fused_experts by native" in line for line in llm.info.report)
            assert said == (not disabled)
    assert dtype != "float32" or answers[0] == answers[1]
