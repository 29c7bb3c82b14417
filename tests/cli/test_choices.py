"""What ``--explain`` says of the engine: the choices that a start makes, without one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from treadle.config import from_options
from treadle.errors import ConfigError, UnsupportedModelError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import tiny_config
from treadle.text.assets import open_checkpoint, plugin_config
from treadle_cli.choices import ConfigChoice, explain

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}


def explain_choices(folder: Path, **options: Any) -> dict[str, ConfigChoice]:
    """By what is chosen; the reasons of several of one name are joined."""
    config = from_options(model=str(folder), device="cpu", **options)
    plugins = PluginManager(plugin_config(config))
    rows: dict[str, ConfigChoice] = {}
    for row in explain(config, plugins, open_checkpoint(config, plugins)):
        before = rows.get(row.name)
        reason = row.reason if before is None else f"{before.reason}; {row.reason}"
        rows[row.name] = msgspec.structs.replace(row, reason=reason)
    return rows


def write_config(folder: Path, architecture: str, changes: Mapping[str, Any] | None = None) -> Path:
    """A checkpoint that has no weights and no tokenizer."""
    values = tiny_config(architecture).to_dict() | dict(changes or {})
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "MixtralForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Phi3ForCausalLM",
    ],
)
def test_every_family_is_asked_without_memory(architecture: str, tmp_path: Path) -> None:
    rows = explain_choices(write_config(tmp_path, architecture))
    assert rows["architecture"].choice.startswith(architecture)
    assert "sdpa" in rows["attention-backend"].choice
    assert rows["quantization"].choice == "none"
    assert "linear" in rows["kernels"].reason and "argmax" in rows["kernels"].reason
    assert rows["load-format"].choice == "auto" and "no weights" in rows["load-format"].reason


def test_offers_and_names_come_with_what_was_not_taken(tmp_path: Path) -> None:
    rows = explain_choices(write_config(tmp_path, "LlamaForCausalLM"))
    assert rows["attention-backend"].reason.startswith("the best offer (50) for 4 heads")
    refusals = dict(rows["attention-backend"].alternatives)
    assert "is not CUDA" in refusals["triton"]
    assert rows["distributed-executor-backend"].choice.startswith("uni (treadle-executor-uni")
    assert rows["distributed-executor-backend"].reason == "the default"
    assert ("mp", "taken with --distributed-executor-backend mp") in rows[
        "distributed-executor-backend"
    ].alternatives
    priority = explain_choices(tmp_path, scheduling_policy="priority")["scheduling-policy"]
    assert (priority.reason, [name for name, _ in priority.alternatives]) == (
        "--scheduling-policy priority",
        ["fcfs"],
    )


def test_attention_is_that_of_one_rank(tmp_path: Path) -> None:
    rows = explain_choices(write_config(tmp_path, "LlamaForCausalLM"), tensor_parallel_size=2)
    assert "for 2 heads of 16, 1 of keys" in rows["attention-backend"].reason
    communicator = rows["communicator"]
    assert communicator.choice == "torch.distributed" and communicator.reason == "no backend offers"
    assert dict(communicator.alternatives)["symmetric"] == "needs CUDA devices, this is cpu"


def test_quantization_is_the_checkpoints_or_the_users(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "LlamaForCausalLM", {"quantization_config": AWQ})
    row = explain_choices(folder)["quantization"]
    assert row.choice.startswith("awq (treadle-awq") and "quant_method" in row.reason
    unnamed = {"w_bit": 4, "q_group_size": 32}
    folder = write_config(tmp_path, "LlamaForCausalLM", {"quantization_config": unnamed})
    row = explain_choices(folder)["quantization"]
    assert row.choice.startswith("awq (") and "w_bit and q_group_size" in row.reason
    assert ("gptq", "sees nothing of its own") in row.alternatives
    plain = write_config(tmp_path, "LlamaForCausalLM")
    row = explain_choices(plain, quantization="fp8")["quantization"]
    assert row.choice.startswith("fp8 (") and row.reason == "--quantization fp8"


def test_what_a_start_refuses_is_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "LlamaForCausalLM", {"architectures": ["NobodyForCausalLM"]})
    with pytest.raises(UnsupportedModelError, match="NobodyForCausalLM"):
        explain_choices(folder)
    with pytest.raises(ConfigError, match="'triton', which cannot serve this model"):
        explain_choices(write_config(tmp_path, "LlamaForCausalLM"), attention_backend="triton")


def test_a_pin_is_shown(tmp_path: Path) -> None:
    rows = explain_choices(
        write_config(tmp_path, "LlamaForCausalLM"),
        pin_plugin=["scheduling_policies:fcfs=treadle-core"],
    )
    assert rows["scheduling-policy"].choice.endswith("pinned)")


def test_a_model_that_wants_memory_leaves_the_rest(tmp_path: Path) -> None:
    plugin = tmp_path / "greedy.py"
    plugin.write_text(
        "import torch\nfrom treadle.api import impl\nfrom treadle.api.models import ModelSpec\n"
        'TREADLE = {"models": ["GreedyForCausalLM"]}\n'
        "def build(ctx): return torch.ones(1).item()\n"
        "@impl\ndef treadle_model(architecture):\n"
        '    return ModelSpec(architecture, build) if architecture == TREADLE["models"][0] else None\n'
    )
    folder = write_config(tmp_path, "LlamaForCausalLM", {"architectures": ["GreedyForCausalLM"]})
    rows = explain_choices(folder, plugin_file=[str(plugin)])
    assert rows["attention-backend"].choice == "unknown"
    assert "cannot be built on the device meta" in rows["attention-backend"].reason
    assert {"kernels", "distributed-executor-backend", "structured-output-backends"} <= rows.keys()
