"""``treadle quantize --method awq|gptq``: what is asked of the user, and with llm-compressor what it writes."""

from __future__ import annotations

import builtins
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from treadle_command_quantize.calibration import Calibration, calibrate, read_texts

from treadle.errors import ConfigError
from treadle.loading import fetch, parse_ref
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel
from treadle_cli.main import main

DEMO = "demo:treadle-demo"
IDS = torch.arange(3, 40)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def quantize(*arguments: str, model: str = DEMO) -> int:
    with pytest.raises(SystemExit) as left:
        main(["quantize", model, *arguments])
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-m", "gptq"), "gptq needs --calibration"),
        (("-m", "awq", "--calibration", "missing.txt"), "missing.txt cannot be read"),
        (("-m", "int8", "--calibration", "missing.txt"), "int8 takes no --calibration"),
        (("-m", "gptq", "--group-size", "7"), "multiple of 8"),
    ],
)
def test_what_cannot_be_meant(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(*arguments, "-o", str(tmp_path / "out")) != 0
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.txt", "one\ntwo", ["one\ntwo"]),
        ("a.jsonl", '{"text": "one"}\n{"text": "two", "id": 3}', ["one", "two"]),
        ("a.txt", " \n", "has no text"),
        ("a.jsonl", '{"text": "one"}\n{"prompt": "two"}', "line 2 is .* an object with text"),
        ("a.jsonl", '{"text": "one"', "line 1"),
    ],
)
def test_texts_of_a_file(tmp_path: Path, name: str, content: str, texts: list[str] | str) -> None:
    path = tmp_path / name
    path.write_text(content)
    if isinstance(texts, list):
        assert read_texts(path) == texts
    else:
        with pytest.raises(ConfigError, match=texts):
            read_texts(path)


def test_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = fetch(PluginManager(), parse_ref(DEMO))
    imported = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("llmcompressor"):
            raise ImportError(f"No module named {name!r}")
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=re.escape("commands/quantize[calibration]")):
        calibrate(files, tmp_path / "out", Calibration("gptq"), ["text"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["awq", "gptq"])
@torch.inference_mode()
def test_the_model_that_llm_compressor_makes(
    tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is read as transformers reads it, and the errors of its layers are told."""
    pytest.importorskip("llmcompressor", reason="calibrates with llm-compressor itself")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    demo = fetch(PluginManager(), parse_ref(DEMO)).root
    vocabulary = json.loads((demo / "config.json").read_text())["vocab_size"]
    source = make_checkpoint(tmp_path / "source", vocab_size=vocabulary, **SIZES)
    for file in demo.glob("tokenizer*"):
        shutil.copyfile(file, source / file.name)
    texts = tmp_path / "texts.jsonl"
    lines = ["The quick brown fox jumps over the lazy dog. " * 4, "One, two, three, four. " * 6]
    texts.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    output = tmp_path / "out"
    arguments = ("-m", method, "--calibration", str(texts), "-o", str(output))
    ignored = ("--ignore", "down_proj") if method == "gptq" else ()
    assert quantize(*arguments, *ignored, model=str(source)) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"^layer \d+  \d+\.\d\d%$", printed, re.MULTILINE)) == 2
    assert "2 layers quantized" in printed
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert config["quant_method"] == "compressed-tensors"
    assert group["weights"]["symmetric"] == (method == "gptq")
    assert any("down_proj" in name for name in config["ignore"]) == (method == "gptq")
    plugins = PluginManager()
    theirs = AutoModelForCausalLM.from_pretrained(
        output,
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(run_compressed=False),
    )
    expected = theirs(IDS[None]).logits[0]
    full, rounded = (TinyModel(root, plugins).logits(IDS) for root in (source, output))
    assert (rounded - expected).abs().max() < 1e-3
    assert (rounded - full).abs().max() > 0.01, "nothing is lost, so this shows nothing"
