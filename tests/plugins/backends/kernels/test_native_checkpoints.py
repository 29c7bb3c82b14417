"""Checkpoints in four bits in one call of native kernels, against torch on the same weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_formats.awq import GemvFormat
from quantized_formats.bitsandbytes import FourBitFormat, Int8Format
from quantized_formats.compressed_tensors import Fp4Format, IntFormat, UnpackedFormat
from quantized_formats.gguf_file import convert
from quantized_formats.hqq import HqqFormat
from quantized_formats.torchao import TorchAoFormat
from safetensors.torch import load_file, save_file
from torch import Tensor
from treadle_kernels_native import library

from treadle import LLM, SamplingParams
from treadle.errors import CheckpointError
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.packing import AwqFormat, Format, Fp8Format, GptqFormat, pack_checkpoint

# Where there is a compiler, a library that was not built is a failure of the build hook.
if library.missing_reason() is not None and shutil.which("cc") is None:
    pytest.skip(str(library.missing_reason()), allow_module_level=True)

SETS = library.instruction_sets(library.load_library())
SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
FORMATS: dict[str, Format] = {
    "awq": AwqFormat(128),
    "awq, groups of 64": AwqFormat(64),
    "awq, one group": AwqFormat(-1),
    "awq, gemv": GemvFormat(group=128),
    "gptq": GptqFormat(group_size=128),
    "gptq, version 2, zero points": GptqFormat(group_size=64, sym=False, version=2),
    "gptq, zero points, no g_idx": GptqFormat(group_size=64, sym=False, with_g_idx=False),
    "gptq, act-order": GptqFormat(group_size=64, desc_act=True),
    "gptq, act-order, zero points": GptqFormat(group_size=128, desc_act=True, sym=False),
    "compressed-tensors": IntFormat(group_size=128),
    "compressed-tensors, zero points": IntFormat(group_size=64, symmetric=False),
    "compressed-tensors, act-order": IntFormat(group_size=64, act_order=True, symmetric=False),
    "hqq": HqqFormat(),
    "awq, groups of 32": AwqFormat(32),
    "two bits": HqqFormat(bits=2),
    "NF4": FourBitFormat(double=True),
    "FP4": FourBitFormat("fp4"),
    "MXFP4": Fp4Format(32),
    "three bits, act-order": GptqFormat(3, group_size=64, desc_act=True, sym=False),
}
BYTES: dict[str, Format] = {
    "gptq, 8 bits": GptqFormat(8, group_size=64),
    "gptq, 8 bits, act-order": GptqFormat(8, group_size=32, desc_act=True, sym=False),
    "gptq, 8 bits, one group": GptqFormat(8, group_size=-1),
    "awq, groups of 16": AwqFormat(16),
    "W8A8": UnpackedFormat(inputs="symmetric"),
    "W8A8, zero points": UnpackedFormat(inputs="asymmetric", symmetric=False),
    "LLM.int8": Int8Format(),
    "torchao": TorchAoFormat(),
    "FP8": Fp8Format(),
    "FP8, blocks": Fp8Format("block"),
    "NVFP4": Fp4Format(),
}
"""Formats in eight bits, or brought into them."""
REFUSED: dict[str, tuple[Format, dict[str, Any], str]] = {
    "levels": (
        FourBitFormat(),
        {"intermediate_size": 192},
        "down_proj has 192 inputs, which is no multiple of 128",
    ),
    "groups": (AwqFormat(8), {}, "128 inputs in groups of 8, which are to be a multiple of 16"),
    "float32": (AwqFormat(64), {"dtype": "float32"}, "has quantized weights for float32"),
}
ERROR = 0.4
"""Of a logarithm of a probability, by activations and a head in eight bits: at most 0.25 here, and 0.13 in torch in
bfloat16. Without zero points other tokens are probable."""


def checkpoint(tmp_path: Path, format: Format, full: Sequence[str] = (), **changes: Any) -> Path:
    sizes = SIZES | changes
    source = make_checkpoint(tmp_path / "source", "Qwen3ForCausalLM", tokenizer=True, **sizes)
    pack_checkpoint(source, tmp_path / "packed", tmp_path / "plain", format, full)
    return tmp_path / "packed"


def answer(folder: Path, isa: str | None, **options: Any) -> tuple[str, list[dict[int, float]]]:
    """The line about steps, and logprobs behind prompts of one token, few and many; ``None``: in torch."""
    values: dict[str, Any] = {"device": "cpu", "num_pages": 64, "page_size": 16}
    values |= {"dtype": "bfloat16", "disable_plugin": ["kernel_ops:native"]}
    if isa is not None:
        values |= {"disable_plugin": [], "plugin_options": {"kernel_ops:native": {"isa": isa}}}
    prompts = [
        {"prompt_token_ids": [(11 * i + n) % 250 for i in range(n)]} for n in (1, 6, 20, 100)
    ]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
    with LLM(str(folder), **values | options) as llm:
        (line,) = (line for line in llm.info.report if line.startswith("Steps")) if isa else ("",)
        outputs = [llm.generate([p], params, use_tqdm=False)[0] for p in prompts]
    steps = [output.outputs[0].logprobs[0] for output in outputs]  # type: ignore[index]
    return line, [{token: value.logprob for token, value in step.items()} for step in steps]


def error(actual: list[dict[int, float]], expected: list[dict[int, float]]) -> float:
    """The largest difference; those at the edge of what is listed may change places."""
    pairs = zip(actual, expected, strict=True)
    common = [[(a[token], e[token]) for token in a.keys() & e.keys()] for a, e in pairs]
    assert min(map(len, common)) >= 15
    return max(abs(a - e) for step in common for a, e in step)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_logprobs_are_those_of_torch(tmp_path: Path, format: Format) -> None:
    folder = checkpoint(tmp_path, format)
    _, expected = answer(folder, None, dtype="float32")
    for isa in SETS:
        line, actual = answer(folder, isa.name.lower())
        assert line.startswith("Steps run in one call by native kernels"), line
        assert error(actual, expected) < ERROR, isa


@pytest.mark.parametrize("format", BYTES.values(), ids=BYTES)
def test_logprobs_of_bytes_are_those_of_torch(tmp_path: Path, format: Format) -> None:
    folder = checkpoint(tmp_path, format)
    _, expected = answer(folder, None, dtype="float32")
    for isa in SETS:
        line, actual = answer(folder, isa.name.lower())
        assert line.startswith("Steps run in one call by native kernels"), line
        assert error(actual, expected) < ERROR, isa


@pytest.mark.parametrize(
    "types", [{"*": "Q8_0"}, {"*": "Q4_0", "attn_v": "Q6_K", "output": "Q6_K"}]
)
def test_gguf_files(tmp_path: Path, types: dict[str, str]) -> None:
    """Also with a head that is quantized, and with several types in one layer."""
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
    source = make_checkpoint(tmp_path / "source", "Qwen3ForCausalLM", tokenizer=True, **sizes)
    convert(source, tmp_path / "m.gguf", tmp_path / "plain", {"token_embd": "F16"} | types)
    _, expected = answer(tmp_path / "m.gguf", None, dtype="float32")
    for isa in SETS:
        line, actual = answer(tmp_path / "m.gguf", isa.name.lower())
        assert line.startswith("Steps run in one call by native kernels"), line
        assert error(actual, expected) < ERROR, isa


def test_inputs_of_four_bits_that_fill_no_block_become_bytes(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, AwqFormat(64), intermediate_size=192)
    line, actual = answer(folder, "auto")
    assert "native kernels" in line
    assert error(actual, answer(folder, None, dtype="float32")[1]) < ERROR


@pytest.mark.parametrize("full", ["down_proj", "gate_proj", "o_proj"])
def test_layers_in_full_precision_run_beside_them(tmp_path: Path, full: str) -> None:
    names = [full, "up_proj"] if full == "gate_proj" else [full]
    folder = checkpoint(tmp_path, AwqFormat(64), names)
    _, expected = answer(folder, None, dtype="float32")
    for isa in SETS:
        line, actual = answer(folder, isa.name.lower())
        assert "native kernels" in line
        assert error(actual, expected) < ERROR, isa


@pytest.mark.parametrize(("format", "changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_others_run_in_torch_and_the_report_says_why(
    tmp_path: Path, format: Format, changes: dict[str, Any], reason: str
) -> None:
    sizes = {name: value for name, value in changes.items() if name in SIZES}
    options = {name: value for name, value in changes.items() if name not in SIZES}
    folder = checkpoint(tmp_path, format, **sizes)
    line, actual = answer(folder, "auto", **options)
    assert line.startswith("Steps run layer by layer in torch (native: layer 0") and reason in line
    assert actual == answer(folder, None, **options)[1]


def change_index(folder: Path, change: Callable[[Tensor], Tensor]) -> None:
    """Change the groups of the inputs of a layer, of which the configuration says that they are in order."""
    file, name = folder / "model.safetensors", "model.layers.1.mlp.down_proj.g_idx"
    tensors = load_file(file)
    tensors[name] = change(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})


def test_an_order_that_only_the_tensors_tell_is_followed(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, GptqFormat(group_size=64))
    change_index(folder, lambda index: index[torch.randperm(256)].clone())
    line, actual = answer(folder, "auto")
    assert "native kernels" in line
    assert error(actual, answer(folder, None, dtype="float32")[1]) < ERROR


def test_groups_of_different_sizes_run_in_torch(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, GptqFormat(group_size=64))
    change_index(folder, lambda index: index.clamp_min(1))
    line, actual = answer(folder, "auto")
    assert "layers.1.mlp.down_proj has groups of different sizes" in line
    assert error(actual, answer(folder, None, dtype="float32")[1]) < ERROR


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda index: index + 1, "names groups 1 to 4, but there are 4 groups of 64"),
        (lambda index: index - 1, "names groups -1 to 2"),
        (lambda index: index[1:].clone(), r"expected shape \[256\]"),
    ],
    ids=["beyond the last", "before the first", "too few"],
)
def test_an_order_that_is_none_is_refused(
    tmp_path: Path, change: Callable[[Tensor], Tensor], reason: str
) -> None:
    folder = checkpoint(tmp_path, GptqFormat(group_size=64, desc_act=True))
    change_index(folder, change)
    with pytest.raises(CheckpointError, match=f"down_proj.*{reason}"):
        answer(folder, "auto")


def test_a_head_may_be_quantized(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, GptqFormat(group_size=64, extra={"lm_head": True}))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    packed = GptqFormat(group_size=64).pack(tensors.pop("lm_head.weight").float())
    save_file(
        tensors | {f"lm_head.{name}": tensor for name, tensor in packed.tensors.items()}, file
    )
    line, actual = answer(folder, "auto")
    assert "native kernels" in line
    assert error(actual, answer(folder, None, dtype="float32")[1]) < ERROR


def test_prompt_logprobs_are_computed_in_torch_on_the_same_weights(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, AwqFormat(64))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    found = []
    for dtype in ("bfloat16", "float32"):
        with LLM(str(folder), device="cpu", num_pages=64, dtype=dtype) as llm:
            ids = [(7 * i) % 250 for i in range(40)]
            (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        steps = (output.prompt_logprobs or [])[1:]
        found.append([step[token].logprob for step, token in zip(steps, ids[1:], strict=True)])
    assert found[0] == pytest.approx(found[1], abs=ERROR)
