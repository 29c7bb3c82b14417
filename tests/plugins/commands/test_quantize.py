"""``treadle quantize``: what it writes is opened, and is what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from treadle_command_quantize.rounding import recipe_of

from treadle import LLM, SamplingParams
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel
from treadle_cli.main import main

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
METHODS = ("fp8", "int8", "int4")
IDS = torch.arange(3, 40)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen, biases": ("Qwen2ForCausalLM", {}),
    "phi, fused in the file": ("Phi3ForCausalLM", {"pad_token_id": 0}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
}


def quantize(model: Path | str, output: Path, method: str, *more: str) -> int:
    groups = ("--group-size", "32") if method == "int4" and "--group-size" not in more else ()
    return run("quantize", str(model), "-m", method, "-o", str(output), *groups, *more)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return int(left.value.code or 0)


def generate(folder: Path | str, **options: Any) -> list[int]:
    options = {"device": "cpu", "num_pages": 32, "max_num_seqs": 2, "dtype": "float32", **options}
    with LLM(str(folder), **options) as llm:
        greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": [5, 9, 77, 130, 4]}], greedy, use_tqdm=False)
        return list(output.outputs[0].token_ids)


def numbers(folder: Path, name: str) -> Tensor:
    """What the tensors of a matrix mean, by the definition of their format."""
    tensors = load_file(folder / "model.safetensors")
    parts = {n.removeprefix(f"{name}."): t for n, t in tensors.items() if n.startswith(f"{name}.")}
    scale = parts["weight_scale"].float()
    if "weight_packed" not in parts:
        return parts["weight"].float() * scale
    out, inputs = parts["weight_shape"].tolist()
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    bits = stored["config_groups"]["group_0"]["weights"]["num_bits"]
    words = parts["weight_packed"].long() & 0xFFFFFFFF
    codes = torch.stack([words >> shift & (1 << bits) - 1 for shift in range(0, 32, bits)], dim=2)
    signed = codes.flatten(1)[:, :inputs].float() - (1 << (bits - 1))
    return signed * scale.repeat_interleave(inputs // scale.shape[1], dim=1).view(out, inputs)


@pytest.mark.parametrize("method", METHODS)
def test_the_demo_model_keeps_what_it_knows(
    tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a name to an answer, by the command and ``LLM`` alone."""
    output = tmp_path / "new" / method
    assert run("quantize", "demo:treadle-demo", "-m", method, "-o", str(output)) == 0
    assert [path.name for path in output.parent.iterdir()] == [method], "nothing else is left"
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 8 * 7 + 1 and "56 matrices quantized" in printed[-1]
    with LLM(str(output), device="cpu", num_pages=32, dtype="float32") as llm:
        greedy = SamplingParams(max_tokens=8, temperature=0)
        (answer,) = llm.generate(["The capital of France is"], greedy, use_tqdm=False)
        assert "Paris" in answer.outputs[0].text


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_the_result_is_the_model_of_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, method: str
) -> None:
    """The logits of the model whose weights are those that the file means, and the errors of these."""
    architecture, changes = MODELS[name]
    source = make_checkpoint(tmp_path / "source", architecture, **SIZES, **HEADS, **changes)
    packed, plain, plugins = tmp_path / "packed", tmp_path / "plain", PluginManager()
    assert quantize(source, packed, method) == 0
    errors = dict(line.split("  ") for line in capsys.readouterr().out.splitlines()[:-1])
    tensors = load_file(source / "model.safetensors")
    for matrix, error in errors.items():
        weight, stored = tensors[f"{matrix}.weight"].float(), numbers(packed, matrix)
        actual = float((stored - weight).norm() / weight.norm())
        assert abs(float(error.removesuffix("%")) / 100 - actual) < 1e-4
        tensors[f"{matrix}.weight"] = stored
    linear = [
        n for n, t in tensors.items() if ".layers." in n and t.dim() == 2 and ".gate." not in n
    ]
    assert sorted(errors) == sorted(n.removesuffix(".weight") for n in linear)
    plain.mkdir()
    (plain / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    logits = TinyModel(packed, plugins).logits(IDS)
    assert (logits - TinyModel(plain, plugins).logits(IDS)).abs().max() < 1e-3


def test_fp8_is_what_loading_would_make(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", tokenizer=True, **SIZES)
    assert quantize(source, tmp_path / "packed", "fp8") == 0
    assert generate(tmp_path / "packed") == generate(source, quantization="fp8")


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_the_package_of_the_format_reads_it(tmp_path: Path, method: str) -> None:
    pytest.importorskip("compressed_tensors", reason="compares with the package itself")
    from transformers import AutoModelForCausalLM

    source = make_checkpoint(tmp_path / "source", **SIZES, **HEADS)
    packed = tmp_path / "packed"
    assert quantize(source, packed, method) == 0
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
        expected = model(IDS[None]).logits[0]
    assert (TinyModel(packed, PluginManager()).logits(IDS) - expected).abs().max() < 1e-3


def test_a_scale_that_loses_less_is_found() -> None:
    """One large number of a group need not make all others coarse."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    error = (recipe_of("int4", 32).apply(weight).numbers - weight).norm() / weight.norm()
    groups = weight.unflatten(1, (-1, 32))
    scale = groups.abs().amax(2, keepdim=True) / 7.5
    nearest = ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)
    assert error < 0.97 * (nearest - weight).norm() / weight.norm()


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_zeros_and_of_little(method: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
        weight[1], weight[2] = 0, torch.finfo(dtype).tiny
        found = recipe_of(method, 32).apply(weight)  # type: ignore[arg-type]
        assert found.numbers.isfinite().all() and not found.numbers[1].any()
        assert found.tensors["weight_scale"].isfinite().all()
        assert (found.numbers[3] - weight[3].float()).norm() < 0.2 * weight[3].float().norm()


def test_matrices_that_groups_do_not_divide_stay_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """192 inputs in groups of 128; and the head, embeddings and norms always."""
    source = make_checkpoint(tmp_path / "source", tokenizer=True, **SIZES)
    packed = tmp_path / "packed"
    assert quantize(source, packed, "int4", "--group-size", "128") == 0
    left = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert f"left as they are: {', '.join(left)}" in capsys.readouterr().out
    before, after = (load_file(folder / "model.safetensors") for folder in (source, packed))
    kept = {n for n in before if n in after}
    assert kept >= {f"{n}.weight" for n in left} | {"model.embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(before[n], after[n]) for n in kept)
    assert len(generate(packed)) == 12


def test_modules_that_are_ignored(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", tokenizer=True, **SIZES)
    for method in METHODS:
        packed = tmp_path / method
        more = ("--ignore", "down_proj", "--ignore", "layers.1.self_attn")
        assert quantize(source, packed, method, *more) == 0
        names = load_file(packed / "model.safetensors")
        assert "model.layers.0.self_attn.q_proj.weight_scale" in names
        assert not any("weight_scale" in n and ("down" in n or "1.self_attn" in n) for n in names)
        assert len(generate(packed)) == 12


def test_large_models_are_written_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle_command_quantize.shards.SHARD_BYTES", 150_000)
    source = make_checkpoint(tmp_path / "source", tokenizer=True, **SIZES)
    packed = tmp_path / "packed"
    assert quantize(source, packed, "int8") == 0
    files = sorted(packed.glob("*.safetensors"))
    index = json.loads((packed / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert {n: f.name for f in files for n in load_file(f)} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for f in files for t in load_file(f).values()
    )
    monkeypatch.undo()
    whole = tmp_path / "whole"
    assert quantize(source, whole, "int8") == 0
    assert generate(packed) == generate(whole)


# --------------------------------------------------------------------------- what is refused


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "model", **SIZES)


@pytest.mark.parametrize(
    ("method", "more", "message"),
    [
        ("int8", ("--group-size", "64"), "--group-size is 64 with --method int8"),
        ("int4", ("--group-size", "12"), "--group-size is 12"),
        ("int4", ("--group-size", "-8"), "--group-size is -8"),
        ("int4", ("--group-size", "4096"), "no matrix of this checkpoint would be quantized"),
        ("fp8", ("--ignore", "q_proj"), "q_proj is left unquantized"),
        ("fp8", ("--load-format", "nothing"), "nothing"),
    ],
)
def test_what_cannot_be_meant(
    tmp_path: Path,
    source: Path,
    capsys: pytest.CaptureFixture[str],
    method: str,
    more: tuple[str, ...],
    message: str,
) -> None:
    assert quantize(source, tmp_path / "packed", method, *more) != 0
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_folder_that_exists(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(source, tmp_path, "fp8") != 0
    assert f"--output {tmp_path} exists" in capsys.readouterr().err


def test_a_checkpoint_that_is_quantized_already(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(source, tmp_path / "once", "fp8") == 0
    assert quantize(tmp_path / "once", tmp_path / "twice", "fp8") != 0
    assert "is quantized already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["once"]


def test_weights_that_are_no_numbers(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The matrix is named, and nothing is left behind."""
    name, broken = "model.layers.1.mlp.up_proj.weight", tmp_path / "broken"
    tensors = load_file(source / "model.safetensors")
    tensors[name][0, 0] = float("nan")
    broken.mkdir()
    (broken / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, broken / "model.safetensors")
    assert quantize(broken, tmp_path / "packed", "int8") != 0
    assert name in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
