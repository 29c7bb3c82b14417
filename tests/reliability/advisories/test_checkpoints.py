"""Advisories of what loads models: a checkpoint is data, whatever it says of itself."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from treadle import LLM
from treadle.errors import TreadleError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel

FILES = (
    *("config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json"),
    *("preprocessor_config.json", "image_processor.json", "video_preprocessor_config.json"),
)
CLASSES = (
    *("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor"),
    *("AutoImageProcessor", "AutoFeatureExtractor", "AutoVideoProcessor"),
)
OPTIONS: dict[str, Any] = {"device": "cpu", "num_pages": 16, "max_num_seqs": 1, "cpu_threads": 1}


def with_code(folder: Path, **changes: Any) -> Path:
    """Make a checkpoint whose files name classes of a module that leaves a mark when imported.

    Return the file that the module would write.
    """
    make_checkpoint(folder, tokenizer=True)
    mark = folder.parent / "mark"
    code = f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\nraise SystemExit(3)\n"
    names = ("evil", "configuration_evil", "modeling_evil", "tokenization_evil", "processing_evil")
    for name in (*names, "__init__", "setup", "sitecustomize"):
        (folder / f"{name}.py").write_text(code)
    for name in FILES:
        path = folder / name
        fields = json.loads(path.read_text()) if path.exists() else {}
        references = {c: "evil.Evil" for c in CLASSES}
        if name == "tokenizer_config.json":
            references["AutoTokenizer"] = ["evil.Evil", "evil.Evil"]  # type: ignore[assignment]
        fields |= {"auto_map": references, "trust_remote_code": True, "code_revision": "main"}
        fields |= {"custom_generate": "evil", "processor_class": "Evil"}
        if name == "config.json":
            fields |= changes
        path.write_text(json.dumps(fields))
    return mark


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"architectures": ["Unknown"]},
        {"architectures": ["evil.Evil"], "model_type": "evil"},
        {"text_config": {"auto_map": {"AutoConfig": "evil.Evil"}, "trust_remote_code": True}},
        {"hidden_act": "evil.Evil"},
        {"quantization_config": {"quant_method": "evil.Evil", "trust_remote_code": True}},
        {"attn_implementation": "evil/evil", "_attn_implementation": "evil/evil"},
    ],
    ids=lambda changes: ",".join(changes) or "known",
)
def test_code_in_a_checkpoint_is_never_run(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    mark = with_code(folder, **changes)
    try:
        with LLM(str(folder), **OPTIONS) as llm:
            llm.chat([{"role": "user", "content": "a"}], use_tqdm=False)
    except TreadleError:
        assert changes, "a checkpoint that also has code is served without it"
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "a/../../b", "..", "\x00"])
def test_the_name_of_a_template_is_no_path(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", tokenizer=True)
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    fields["chat_template"] = [{"name": n, "template": "x"} for n in (name, "default")]
    path.write_text(json.dumps(fields))
    before = {p for p in tmp_path.rglob("*")}
    with LLM(str(folder), **OPTIONS):
        pass
    assert {p for p in tmp_path.rglob("*")} == before


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(header: Any, rest: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rest


HUGE = (
    [65536, 65536],
    [2**31, 2],
    [2**63],
    [2**64],
    [2**40, 2**40],
    [-1],
    [0],
    [1.5],
    ["1"],
    {},
    None,
)
OFFSETS = ([0, 2**63], [-1, 8], [8, 0], [2**64, 2**64 + 4], [0], [], [0.0, 4.0], None)


@pytest.mark.parametrize("field", ["shape", "data_offsets", "dtype"])
def test_sizes_in_a_header_are_checked_before_memory_is_taken(field: str, tmp_path: Path) -> None:
    file = make_checkpoint(tmp_path) / "model.safetensors"
    header, rest = header_of(file.read_bytes())
    name = "model.norm.weight"
    values = {"shape": HUGE, "data_offsets": OFFSETS, "dtype": ("I64", "F8_E9M9", "", 5, None)}
    plugins = PluginManager()
    for value in values[field]:
        file.write_bytes(with_header(header | {name: header[name] | {field: value}}, rest))
        with pytest.raises(TreadleError, match=r"model\.safetensors|model\.norm\.weight"):
            TinyModel(tmp_path, plugins)


def test_no_damaged_file_does_more_than_be_refused(tmp_path: Path) -> None:
    """Bytes of the header and the configuration, changed at random; a model may well load."""
    folder, plugins, rng = make_checkpoint(tmp_path), PluginManager(), random.Random(1)
    num_refused = 0
    for name in ("model.safetensors", "config.json"):
        file = folder / name
        sound = file.read_bytes()
        end = min(len(sound), 600)
        for _ in range(60):
            data = bytearray(sound)
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(end)] = rng.randrange(256)
            file.write_bytes(data)
            try:
                TinyModel(folder, plugins)
            except TreadleError:
                num_refused += 1
        file.write_bytes(sound)
    assert num_refused > 60
    TinyModel(folder, plugins)
