"""Quantized checkpoints from end to end: the tokens of the dequantized model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from treadle import LLM, SamplingParams
from treadle.errors import ConfigError, UnsupportedModelError
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.packing import AwqFormat, Format, Fp8Format, GptqFormat, pack_checkpoint

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
PROMPTS = [[5, 9, 77, 130, 4], [250, 3], list(range(40))]
CASES: dict[str, tuple[str, Format]] = {
    "awq": ("LlamaForCausalLM", AwqFormat(64)),
    "awq, biases": ("Qwen2ForCausalLM", AwqFormat(32)),
    "gptq": ("LlamaForCausalLM", GptqFormat(group_size=128)),
    "gptq, act-order": ("Qwen3ForCausalLM", GptqFormat(desc_act=True, sym=False)),
    "gptq, 8 bits": ("Qwen3ForCausalLM", GptqFormat(bits=8, group_size=-1)),
    "fp8": ("LlamaForCausalLM", Fp8Format(static=True)),
    "fp8, blocks": ("Qwen3ForCausalLM", Fp8Format("block")),
    "fp8, outputs": ("LlamaForCausalLM", Fp8Format("channel")),
}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def generate(folder: Path, **options: Any) -> list[list[int]]:
    options = {"device": "cpu", "num_pages": 64, "max_num_seqs": 4, "dtype": "float32", **options}
    with LLM(str(folder), **options) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_dequantized_model(tmp_path: Path, name: str) -> None:
    architecture, format = CASES[name]
    source = make_checkpoint(tmp_path / "source", architecture, tokenizer=True, **SIZES)
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    pack_checkpoint(source, packed, plain, format, ("0.mlp.down_proj",))
    tokens = generate(packed)
    assert tokens == generate(plain)
    assert tokens != generate(source), "the checkpoint loses nothing, so this shows nothing"


def test_fp8_made_while_loading_halves_the_layers(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", tokenizer=True, **SIZES)
    with LLM(str(source), device="cpu", num_pages=16, dtype="bfloat16") as llm:
        before = llm.info.weights_bytes
    with LLM(str(source), device="cpu", num_pages=16, dtype="bfloat16", quantization="fp8") as llm:
        after = llm.info.weights_bytes
    unquantized_bytes = 2 * 2 * 320 * 128  # embedding and head stay as they are
    assert (after - unquantized_bytes) / (before - unquantized_bytes) == pytest.approx(
        0.5, abs=0.03
    )
    pack_checkpoint(source, tmp_path / "packed", tmp_path / "plain", Fp8Format("channel"))
    assert generate(source, quantization="fp8") == generate(tmp_path / "plain")
    assert generate(source, quantization="ptpc_fp8") == generate(tmp_path / "plain")


def test_an_awq_checkpoint_by_the_names_of_others(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", tokenizer=True, **SIZES)
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    pack_checkpoint(source, packed, plain, AwqFormat())
    assert generate(packed, quantization="awq_marlin") == generate(plain)


def test_four_bits_in_bfloat16_use_the_int4_operator(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", tokenizer=True, **SIZES)
    for name, format in {"awq": AwqFormat(), "gptq": GptqFormat(desc_act=True)}.items():
        packed = tmp_path / name
        pack_checkpoint(source, packed, tmp_path / f"{name} plain", format)
        options = {"device": "cpu", "num_pages": 16, "dtype": "bfloat16"}
        with LLM(str(packed), **options) as llm:
            small = llm.info.weights_bytes
        with LLM(str(source), **options) as llm:
            large = llm.info.weights_bytes
        unquantized_bytes = 2 * 2 * 320 * 128
        assert (small - unquantized_bytes) / (large - unquantized_bytes) < 0.45, name
        assert len(generate(packed, dtype="bfloat16")) == len(PROMPTS)


@pytest.mark.parametrize("key", ["awq", "gptq", "fbgemm_fp8"])
def test_a_plain_checkpoint_is_not_what_the_option_says(tmp_path: Path, key: str) -> None:
    source = make_checkpoint(tmp_path, tokenizer=True, **SIZES)
    with pytest.raises(ConfigError, match="not quantized"):
        generate(source, quantization=key)


def test_one_method_cannot_read_another(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", tokenizer=True, **SIZES)
    pack_checkpoint(source, tmp_path / "packed", tmp_path / "plain", AwqFormat())
    for key in ("gptq", "fp8"):
        with pytest.raises(ConfigError, match="quantized with 'awq'"):
            generate(tmp_path / "packed", quantization=key)


def test_a_method_that_nobody_has(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", tokenizer=True, **SIZES)
    format = AwqFormat(extra={"quant_method": "squeezellm"})
    pack_checkpoint(source, tmp_path / "packed", tmp_path / "plain", format)
    with pytest.raises(UnsupportedModelError, match="squeezellm"):
        generate(tmp_path / "packed")


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8"])
def test_dummy_weights_run(tmp_path: Path, method: str) -> None:
    """For benchmarks without a checkpoint: config.json is enough."""
    source = make_checkpoint(tmp_path / "source", tokenizer=True, **SIZES)
    format = {"awq": AwqFormat(), "gptq": GptqFormat(desc_act=True), "fp8": Fp8Format("block")}
    pack_checkpoint(source, tmp_path / "packed", tmp_path / "plain", format[method])
    tokens = generate(tmp_path / "packed", load_format="dummy")
    assert all(len(ids) == 12 for ids in tokens)
    assert torch.tensor(tokens).max() < 320
