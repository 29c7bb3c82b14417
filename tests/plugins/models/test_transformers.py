"""treadle-transformers: the suite of models for architectures that no other plugin has, and refusals."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams
from treadle.config import PluginConfig, from_options
from treadle.engine.core import EngineCore
from treadle.errors import CheckpointError, UnsupportedModelError
from treadle.plugins import PluginManager
from treadle.testing.architectures import ModelSuite
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel, transformers_logits
from treadle.testing.packing import AwqFormat, Format, GptqFormat, pack_checkpoint
from treadle.testing.plugin import PluginSuite
from treadle.testing.ranks import run_on_ranks

pytestmark = pytest.mark.early

IDS = torch.randint(0, 250, (45,), generator=torch.Generator().manual_seed(9))
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8, "long_factor": [1.0 + i / 4 for i in range(8)],
}  # fmt: skip


class TestPhi3(PluginSuite, ModelSuite):
    """Projections that are one matrix, whose outputs every rank needs whole."""

    plugin = "models:Phi3ForCausalLM"
    tolerance = 5e-5
    variants: ClassVar = {
        "plain": {},
        "window": {"sliding_window": 7},
        "part rotary": {"partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    }


class TestGPTNeoX(ModelSuite):
    """Parallel residuals, biases, rotation of a quarter of each head; checkpoints say embed_out."""

    plugin = "models:GPTNeoXForCausalLM"
    tolerance = 5e-5
    variants: ClassVar = {"parallel": {}, "serial": {"use_parallel_residual": False}}


class TestOlmo3(ModelSuite):
    """Norms over all heads, so that attention is not divided; windows in some layers."""

    plugin = "models:Olmo3ForCausalLM"
    tolerance = 5e-5
    variants: ClassVar = {
        "windows": {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }
    }


class TestStarcoder2(ModelSuite):
    plugin = "models:Starcoder2ForCausalLM"
    tolerance = 5e-5
    variants: ClassVar = {
        "plain": {"use_bias": True},
        "one key head": {"num_key_value_heads": 1, "sliding_window": 9},
    }


class TestGranite(ModelSuite):
    """Multipliers of embeddings, attention, residuals and logits."""

    plugin = "models:GraniteForCausalLM"
    tolerance = 5e-5
    variants: ClassVar = {
        "scaled": {
            "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7,
            "logits_scaling": 2.0, "attention_bias": True,
        }
    }  # fmt: skip


class TestOlmoe(ModelSuite):
    plugin = "models:OlmoeForCausalLM"
    tolerance = 5e-5
    variants: ClassVar = {"plain": EXPERTS, "normalised": {**EXPERTS, "norm_topk_prob": True}}


class TestPhimoe(ModelSuite):
    """Experts under the names of Mixtral's, and norms with biases."""

    plugin = "models:PhimoeForCausalLM"
    tolerance = 5e-5
    variants: ClassVar = {"plain": {"num_local_experts": 4}}


class TestDeepseekV3(ModelSuite):
    """Values smaller than keys, one key part for all heads, buffers in the checkpoint."""

    plugin = "models:DeepseekV3ForCausalLM"
    tolerance = 5e-5
    variants: ClassVar = {"plain": LATENT}


class TestGPT2(ModelSuite):
    """Learned positions; its matrices lie transposed, and nothing says how to divide them."""

    plugin = "models:GPT2LMHeadModel"
    tolerance = 5e-5
    ranks = 1
    variants: ClassVar = {"plain": {"n_inner": 96}}


class TestGptOssPinned(ModelSuite):
    """Sinks, and experts that only transformers multiplies."""

    plugin = "models:GptOssForCausalLM"
    tolerance = 5e-5
    ranks = 1
    variants: ClassVar = {
        "plain": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}
    }

    def plugin_manager(self) -> PluginManager:
        return PluginManager(PluginConfig(pin_plugin=[f"{self.plugin}=treadle-transformers"]))

    def test_quantization_is_asked_by_the_checkpoints_names(self, plain: Path) -> None:
        with pytest.raises(UnsupportedModelError, match="cannot be quantized"):
            super().test_quantization_is_asked_by_the_checkpoints_names(plain)


@pytest.mark.skipif(not hasattr(transformers, "FlintForCausalLM"), reason="of later versions")
class TestFlint(ModelSuite):
    """Sinks that are divided among ranks."""

    plugin = "models:FlintForCausalLM"
    tolerance = 5e-5


class TestLlamaPinned(ModelSuite):
    """What another plugin has runs here as well, if it is asked to."""

    plugin = "models:LlamaForCausalLM"
    tolerance = 5e-5

    def plugin_manager(self) -> PluginManager:
        return PluginManager(PluginConfig(pin_plugin=[f"{self.plugin}=treadle-transformers"]))

    def test_it_equals_the_plugin_of_its_own(self, plain: Path) -> None:
        torch.testing.assert_close(
            self.model(plain).logits(self.ids),
            TinyModel(plain, PluginManager()).logits(self.ids),
            atol=1e-5,
            rtol=0,
        )


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


def test_it_stands_behind_all_others(plugins: PluginManager) -> None:
    assert plugins.choose("models", "LlamaForCausalLM").dist == "treadle-llama"
    assert plugins.choose("models", "Phi3ForCausalLM").dist == "treadle-transformers"


def test_soft_caps_reach_attention_and_logits(tmp_path: Path) -> None:
    pinned = PluginManager(
        PluginConfig(pin_plugin=["models:Gemma2ForCausalLM=treadle-transformers"])
    )
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 7}
    folder = make_checkpoint(tmp_path, "Gemma2ForCausalLM", **caps)
    model = TinyModel(folder, pinned)
    assert {a.request.softcap for a in model.attentions} == {2.0}
    torch.testing.assert_close(
        model.logits(IDS), transformers_logits(folder, IDS), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("architecture", ["Phi3ForCausalLM", "Olmo3ForCausalLM"])
def test_two_and_four_ranks_equal_one(
    tmp_path: Path, plugins: PluginManager, architecture: str
) -> None:
    folder = make_checkpoint(tmp_path, architecture)
    expected = TinyModel(folder, plugins).logits(IDS)
    for ranks in (2, 4):
        for actual in run_on_ranks(
            ranks, lambda r: TinyModel(folder, plugins, tp_group=r).logits(IDS)
        ):
            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


def test_long_rotary_is_fixed_for_the_engine(tmp_path: Path, plugins: PluginManager) -> None:
    """Transformers turns all sequences of a batch by its longest; treadle by what it admits."""
    folder = make_checkpoint(tmp_path, "Phi3ForCausalLM", rope_parameters=LONG)
    long = TinyModel(folder, plugins)
    torch.testing.assert_close(
        long.logits(IDS), transformers_logits(folder, IDS), atol=1e-5, rtol=0
    )
    short = TinyModel(folder, plugins, model_len=32)
    torch.testing.assert_close(
        short.logits(IDS[:20]), transformers_logits(folder, IDS[:20]), atol=1e-5, rtol=0
    )
    long_logits, short_logits = long.batch([IDS, IDS[:5]], [[45], [5]])
    torch.testing.assert_close(short_logits, long_logits[:5], atol=1e-5, rtol=0)


def test_weights_are_in_memory_once(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(tmp_path, "OlmoeForCausalLM", tie_word_embeddings=True, **EXPERTS)
    model = TinyModel(folder, plugins).model
    weights = {n: p for n, p in model.named_parameters() if not n.endswith("kv_scale")}
    sizes = {p.data_ptr(): p.numel() for p in weights.values()}
    stored = sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    assert sum(sizes.values()) == stored
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_bfloat16_stays_close_to_transformers(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(tmp_path, "Phi3ForCausalLM", dtype=torch.bfloat16)
    exact = transformers_logits(folder, IDS)
    reference = transformers_logits(folder, IDS, torch.bfloat16)
    actual = TinyModel(folder, plugins, dtype=torch.bfloat16).logits(IDS)
    assert (actual - exact).abs().mean() < 1.5 * (reference - exact).abs().mean()


def test_old_names_without_a_prefix_load(tmp_path: Path, plugins: PluginManager) -> None:
    """The first GPT-2 has ``h.0…`` and masks, where later ones have ``transformer.h.0…``."""
    folder = make_checkpoint(tmp_path, "GPT2LMHeadModel", n_inner=96)
    expected = TinyModel(folder, plugins).logits(IDS)
    file = folder / "model.safetensors"
    old = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    save_file({**old, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, file)
    assert torch.equal(TinyModel(folder, plugins).logits(IDS), expected)


@pytest.mark.parametrize(
    ("architecture", "changes", "format"),
    [
        ("Phi3ForCausalLM", {}, AwqFormat(32)),
        ("Starcoder2ForCausalLM", {"use_bias": True}, GptqFormat(4, 32)),
        ("OlmoeForCausalLM", EXPERTS, AwqFormat(32)),
    ],
)
def test_a_quantized_model_is_its_dequantized_self(
    tmp_path: Path,
    plugins: PluginManager,
    architecture: str,
    changes: dict[str, Any],
    format: Format,
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    source = make_checkpoint(tmp_path / "source", architecture, **sizes, **changes)
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    pack_checkpoint(source, packed, plain, format, ("1.self_attn.o_proj", "mlp.gate"))
    expected = TinyModel(plain, plugins).logits(IDS)
    torch.testing.assert_close(TinyModel(packed, plugins).logits(IDS), expected, atol=1e-3, rtol=0)
    for actual in run_on_ranks(
        2, lambda ranks: TinyModel(packed, plugins, tp_group=ranks).logits(IDS)
    ):
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=0)


def test_scales_of_the_cache_are_found(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(tmp_path, "Starcoder2ForCausalLM")
    file = folder / "model.safetensors"
    block = "model.layers.1.self_attn"
    scales = {f"{block}.k_proj.k_scale": torch.tensor(2.0), f"{block}.v_scale": torch.tensor(0.5)}
    save_file({**load_file(file), **scales}, file)
    scale_pairs = [attention.scales for attention in TinyModel(folder, plugins).attentions]
    assert scale_pairs == [(1.0, 1.0), (2.0, 0.5), (1.0, 1.0)]


# ------------------------------------------------------------------------------- engines


PROMPTS = [[5, 9, 200, 17], list(range(30, 70)), [1]]


def run(folder: Path, **options: Any) -> dict[str, list[tuple[int, float]]]:
    config = from_options(
        model=str(folder), device="cpu", dtype="float32", cpu_threads=1, num_pages=64, **options
    )
    core = EngineCore(config, PluginManager(config.plugins))
    try:
        params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1)
        for i, prompt in enumerate(PROMPTS):
            core.add_request(EngineRequest(f"r{i}", prompt, params, time.monotonic()))
        entries: dict[str, list[tuple[int, float]]] = {f"r{i}": [] for i in range(len(PROMPTS))}
        while core.has_work:
            for output in core.step():
                for line in output.logprobs or []:
                    entries[output.id].append((line.ids[0], line.logprobs[0]))
    finally:
        core.close()
    return entries


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "Starcoder2ForCausalLM", use_bias=True)
    expected = run(folder)
    actual = run(folder, distributed_executor_backend="mp", tensor_parallel_size=2)
    for name, lines in expected.items():
        assert [token for token, _ in actual[name]] == [token for token, _ in lines]
        assert [v for _, v in actual[name]] == pytest.approx([v for _, v in lines], abs=1e-5)


def test_the_python_interface_generates(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from treadle import LLM

    folder = make_checkpoint(tmp_path, "GPTNeoXForCausalLM", tokenizer=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = model.generate(
        torch.tensor([PROMPTS[0]]), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), device="cpu", dtype="float32", cpu_threads=1, num_pages=64) as llm:
        (output,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params)
    assert output.outputs[0].token_ids == expected[0, len(PROMPTS[0]) :].tolist()


# ------------------------------------------------------------------------------ refusals


def refused(folder: Path, plugins: PluginManager, architecture: str, **config: Any) -> str:
    """The error for a configuration without weights: nothing is loaded before it comes."""
    folder.mkdir(exist_ok=True)
    values = {"architectures": [architecture], **config}
    (folder / "config.json").write_text(json.dumps(values))
    save_file({}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError) as exc_info:
        TinyModel(folder, plugins, model_len=64)
    return str(exc_info.value)


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        ("MambaForCausalLM", {"model_type": "mamba"}, "keeps a state"),
        ("JambaForCausalLM", {"model_type": "jamba"}, "state"),
        ("BloomForCausalLM", {"model_type": "bloom"}, "does not go through"),
        ("BertLMHeadModel", {"model_type": "bert", "num_hidden_layers": 1}, "not causal"),
        ("Llama4ForCausalLM", {"model_type": "llama4_text"}, "layers of type chunked_attention"),
        (
            "Lfm2ForCausalLM",
            {"model_type": "lfm2", "num_hidden_layers": 1, "layer_types": ["conv"]},
            "layers of type conv",
        ),
        ("DogeForCausalLM", {"model_type": "doge", "num_hidden_layers": 1}, "mask of its own"),
        ("DeepseekV32ForCausalLM", {"model_type": "deepseek_v32"}, "picks the keys"),
        ("Gemma3nForCausalLM", {"model_type": "gemma3n_text"}, "name tensors by the pattern"),
        ("Phi3ForCausalLM", {"model_type": "phi3", "num_kv_shared_layers": 2}, "of other layers"),
        ("FuyuForCausalLM", {"model_type": "fuyu"}, "parts besides its language model"),
        ("HrmTextForCausalLM", {"model_type": "hrm_text"}, "only transformers can read"),
        ("Phi3ForCausalLM", {"model_type": "their_own"}, "never run"),
    ],
)
def test_it_refuses_with_the_reason(
    tmp_path: Path, plugins: PluginManager, architecture: str, config: dict[str, Any], reason: str
) -> None:
    message = refused(tmp_path, plugins, architecture, **config)
    assert reason in message and architecture in message and "plugin of its own" in message


@pytest.mark.parametrize("name", ["NoSuchForCausalLM", "T5ForConditionalGeneration"])
def test_what_it_has_never_heard_of_is_an_unknown_architecture(
    tmp_path: Path, plugins: PluginManager, name: str
) -> None:
    message = refused(tmp_path, plugins, name)
    assert f"needs a plugin for {name}" in message and "LlamaForCausalLM" in message
    assert "the fallback of treadle-transformers" in message and "cannot serve it either" in message


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("GPT2LMHeadModel", {"n_inner": 96}, "no plan"),
        ("AriaTextForCausalLM", {"moe_num_experts": 4}, "experts"),
    ],
)
def test_ranks_without_a_plan_are_refused(
    tmp_path: Path, plugins: PluginManager, architecture: str, changes: dict[str, Any], reason: str
) -> None:
    folder = make_checkpoint(tmp_path, architecture, **changes)
    with pytest.raises(UnsupportedModelError, match=reason) as exc_info:
        run_on_ranks(2, lambda ranks: TinyModel(folder, plugins, tp_group=ranks))
    assert "set tensor_parallel_size to 1" in str(exc_info.value)


def test_a_configuration_that_transformers_cannot_build(
    tmp_path: Path, plugins: PluginManager
) -> None:
    folder = make_checkpoint(tmp_path, "Phi3ForCausalLM")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_act": "no_such"}))
    with pytest.raises(CheckpointError, match=r"cannot build Phi3ForCausalLM .*no_such"):
        TinyModel(folder, plugins)


def test_a_damaged_checkpoint_names_the_tensor(tmp_path: Path, plugins: PluginManager) -> None:
    folder = make_checkpoint(tmp_path, "Phi3ForCausalLM")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, file)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        TinyModel(folder, plugins)
    save_file({**tensors, name: tensors[name][:-1].clone()}, file)
    with pytest.raises(CheckpointError, match="does not fit"):
        TinyModel(folder, plugins)
