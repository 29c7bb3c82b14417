"""treadle-bitsandbytes: checkpoints as transformers saves them, and weights made while loading."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_formats.bitsandbytes import FourBitFormat, Int8Format, as_loaded
from torch import Tensor
from treadle_bitsandbytes.blocks import dequantize, levels, pairs, quantize
from treadle_bitsandbytes.config import read_config
from treadle_bitsandbytes.scheme import BitsAndBytesScheme
from treadle_bitsandbytes.states import FourBitState

from treadle import LLM, SamplingParams
from treadle.api.communicators import Communicator
from treadle.api.models import LinearSpec
from treadle.errors import CheckpointError, ConfigError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.linears import Layer, QuantizedLinear, fill, pack
from treadle.testing.models import TinyModel
from treadle.testing.packing import AwqFormat, Format, pack_checkpoint
from treadle.testing.plugin import PluginSuite
from treadle.testing.quantization import QuantizationSuite
from treadle.testing.ranks import run_on_ranks


class TestBitsAndBytes(PluginSuite, QuantizationSuite):
    plugin = "quantization:bitsandbytes"
    formats = {
        "nf4": FourBitFormat(),
        "nf4, double": FourBitFormat(double=True),
        "nf4, blocks over rows": FourBitFormat(block=256, double=True),
        "fp4": FourBitFormat("fp4", storage=torch.bfloat16),
        "int8": Int8Format(),
    }
    refused = {
        "kind": ({"bnb_4bit_quant_type": "af4"}, "'af4'"),
        "bits": ({"load_in_8bit": True}, "load_in_8bit"),
        "no bits": ({"load_in_4bit": None, "_load_in_4bit": False}, "load_in_4bit"),
        "words": ({"load_in_4bit": "yes"}, "load_in_4bit 'yes'"),
        "names": ({"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules"),
        "in full": (
            {
                "load_in_4bit": False,
                "_load_in_4bit": False,
                "load_in_8bit": True,
                "llm_int8_has_fp16_weight": True,
            },
            "llm_int8_has_fp16_weight",
        ),
        "another method": ({"quant_method": "squeezellm"}, "'squeezellm'"),
    }

    def load(
        self,
        format: Format,
        layer: Layer,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        tp_group: Communicator | None = None,
    ) -> QuantizedLinear:
        return super().load(format, layer, as_loaded(format, tensors), dtype, tp_group)


# ------------------------------------------------------------------------- what numbers mean

# What bitsandbytes 0.50 reads from hashed bytes with double quantization, where blocks begin inside rows: a
# weighted sum, and some numbers. By its operator for all devices: the one for CPUs takes a wrong scale there.
GOLDEN = {
    "nf4": (63.858676, [-0.1150305, 0.2893026, -0.0591825, 0.0994754, 0.3020159, 0.2642094]),
    "fp4": (-30.236706, [0.3112745, -0.7836601, 0.1083333, 0.0, -0.2284314, -0.2348039]),
}


def hashed(size: int) -> Tensor:
    pieces = (hashlib.sha256(str(i).encode()).digest() for i in range(size // 32 + 1))
    return torch.frombuffer(bytearray(b"".join(pieces)[:size]), dtype=torch.uint8)


def hashed_state(kind: str, inputs: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A matrix of 6 rows in blocks of 64."""
    values = {
        "shape": [6, inputs],
        "blocksize": 64,
        "dtype": "float32",
        "quant_type": kind,
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": 0.75,
    }
    parts = {
        "quant_map": levels(kind),
        "absmax": hashed(6 * inputs // 64),
        "nested_absmax": torch.tensor([0.5]),
        "nested_quant_map": torch.linspace(-1, 1, 256),
        f"quant_state.bitsandbytes__{kind}": torch.tensor(
            list(json.dumps(values).encode()), dtype=torch.uint8
        ),
    }
    return hashed(3 * inputs)[:, None], parts


def read(kind: str, inputs: int) -> Tensor:
    stored, parts = hashed_state(kind, inputs)
    state = FourBitState("a.weight", parts, kind, "model.safetensors")
    scales = state.row_scales()
    return dequantize(state.rows(stored), pairs(kind)) * scales.repeat_interleave(32, dim=1)


@pytest.mark.parametrize("kind", GOLDEN)
def test_numbers_are_those_of_bitsandbytes(kind: str) -> None:
    numbers = read(kind, 96).flatten()
    total, some = GOLDEN[kind]
    weights = 1 + torch.arange(len(numbers)) % 7
    assert float((numbers.double() * weights).sum()) == pytest.approx(total, abs=1e-5)
    assert numbers[::100].tolist() == pytest.approx(some, abs=1e-6)


@pytest.mark.parametrize("kind", GOLDEN)
def test_every_number_is_that_of_the_package(kind: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="compares with the package")
    stored, parts = hashed_state(kind, 128)
    state = functional.QuantState.from_dict(dict(parts), torch.device("cpu"))
    torch.testing.assert_close(read(kind, 128), functional.dequantize_4bit(stored, state))


@pytest.mark.parametrize("kind", GOLDEN)
def test_levels_that_are_made_are_the_nearest(kind: str) -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(3))
    weight[2, :64] = 0
    packed, absmax = quantize(weight, kind, 64)
    numbers = dequantize(packed, pairs(kind)) * absmax.repeat_interleave(64, dim=1)
    spread = absmax.repeat_interleave(64, dim=1)[..., None] * levels(kind)
    best = (weight[..., None] - spread).abs().amin(-1)
    torch.testing.assert_close((weight - numbers).abs(), best)
    assert not numbers[2, :64].any() and numbers[2, 64:].any()


@pytest.mark.parametrize("kind", GOLDEN)
def test_what_is_made_is_what_the_package_makes(kind: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="compares with the package")
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(3))
    stored, state = functional.quantize_4bit(weight, quant_type=kind, blocksize=64)
    packed, absmax = quantize(weight, kind, 64)
    torch.testing.assert_close(absmax.flatten(), state.absmax)
    # A number in the middle between two levels may be rounded to either.
    differing = packed.flatten() != stored.flatten()
    assert float(differing.float().mean()) < 1e-3


# ------------------------------------------------------------------------------ whole models

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
IDS = torch.arange(3, 40)


@pytest.mark.parametrize(
    "options",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_quant_storage": torch.bfloat16,
        },
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
        {"load_in_8bit": True},
        {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"]},
    ],
)
def test_logits_are_those_of_the_package(tmp_path: Path, options: dict[str, Any]) -> None:
    """transformers saves; its own dequantized model is the reference, on one rank and on two."""
    for package in ("bitsandbytes", "accelerate"):
        pytest.importorskip(package, reason="compares with the packages themselves")
    from quantized_formats.bitsandbytes_reference import compare

    compare(tmp_path, {**SIZES, "head_dim": 32}, **options)


def generate(folder: Path, **options: Any) -> list[list[int]]:
    options = {"device": "cpu", "num_pages": 32, "max_num_seqs": 2, "dtype": "float32", **options}
    with LLM(str(folder), **options) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in ([5, 9, 77, 130, 4], list(range(40)))]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_weights_made_while_loading(tmp_path: Path, kind: str) -> None:
    """The tokens of a checkpoint that was quantized before, and a clear part of the memory."""
    source = make_checkpoint(tmp_path / "source", tokenizer=True, **SIZES)
    format: Format = Int8Format() if kind == "int8" else FourBitFormat(kind)
    pack_checkpoint(source, tmp_path / "packed", tmp_path / "plain", format)
    chosen = {
        "quantization": "bitsandbytes",
        "plugin_options": {"quantization:bitsandbytes": {"type": kind}},
    }
    tokens = generate(source, **chosen)
    assert tokens == generate(tmp_path / "packed") == generate(tmp_path / "plain")
    if kind != "int8":
        assert tokens != generate(source), "nothing is lost, so this shows nothing"
    sizes = []
    for options in ({}, chosen):
        with LLM(str(source), device="cpu", num_pages=16, dtype="bfloat16", **options) as llm:
            sizes.append(llm.info.weights_bytes - 2 * 2 * 320 * 128)
    assert sizes[1] / sizes[0] < (0.55 if kind == "int8" else 0.33)


def test_ranks_share_what_is_made_while_loading(tmp_path: Path) -> None:
    """A block of 64 divides the share of each rank, so that the numbers are the same."""
    sizes = {**SIZES, "intermediate_size": 256}
    source, plugins = make_checkpoint(tmp_path, **sizes), PluginManager()
    whole = TinyModel(source, plugins, quantization="bitsandbytes").logits(IDS)

    def work(tp_group: Communicator) -> Tensor:
        model = TinyModel(source, plugins, tp_group=tp_group, quantization="bitsandbytes")
        return model.logits(IDS)

    for logits in run_on_ranks(2, work):
        assert (logits - whole).abs().max() < 1e-3


def test_a_configuration_that_names_no_method(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", **SIZES)
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    pack_checkpoint(source, packed, plain, Int8Format())
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]["quant_method"]
    (packed / "config.json").write_text(json.dumps(config))
    plugins = PluginManager()
    logits = TinyModel(packed, plugins).logits(IDS)
    assert (logits - TinyModel(plain, plugins).logits(IDS)).abs().max() < 1e-4


def test_another_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", **SIZES)
    pack_checkpoint(source, tmp_path / "packed", tmp_path / "plain", AwqFormat())
    with pytest.raises(ConfigError, match="quantized with 'awq'"):
        TinyModel(tmp_path / "packed", PluginManager(), quantization="bitsandbytes")


def test_sizes_that_ranks_cannot_share() -> None:
    scheme = BitsAndBytesScheme(read_config(FourBitFormat().config()))
    layer = Layer(66, (32,), split="row")
    with pytest.raises(ConfigError, match="33 input features on each rank"):
        run_on_ranks(2, lambda ranks: fill(scheme, layer, {}, torch.float32, tp_group=ranks))
    spec = LinearSpec("a", ("a",), 127, (64,), False, torch.float32)
    method: Any = scheme.linear_method(spec)
    with pytest.raises(CheckpointError, match="127 input features"):
        method.create_weights(torch.nn.Module(), spec)


def test_blocks_that_begin_inside_rows_and_shares() -> None:
    """Rows of 96 and shares of 48 under blocks of 64."""
    format, layer = FourBitFormat(double=True), Layer(96, (64,), split="row")
    stored, weight, _ = pack(format, layer)
    config = read_config(format.config())
    tensors = as_loaded(format, stored)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))

    def work(ranks: Communicator) -> Tensor:
        linear = fill(BitsAndBytesScheme(config), layer, tensors, torch.float32, tp_group=ranks)
        result: Tensor = linear(x.chunk(2, dim=1)[ranks.rank])
        return result

    for y in run_on_ranks(2, work):
        torch.testing.assert_close(y, x @ weight.t(), atol=1e-4, rtol=1e-3)
