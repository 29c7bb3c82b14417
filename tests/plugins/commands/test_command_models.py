"""``treadle models``: every kind of folder is a row, and nothing heavy is imported for it."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from treadle_cli.main import main

TINY: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
DEMO = "demo:treadle-demo"
REVISION = "0123456789abcdef0123456789abcdef01234567"


def safetensors(path: Path, shapes: dict[str, list[int]], dtype: str = "BF16") -> None:
    """A file of zeros; sizes are those of two-byte types."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = 2
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def checkpoint(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    safetensors(folder / "model.safetensors", {"a": [100, 10], "b": [24]})
    return folder


def cache(
    root: Path, repo: str, revision: str = REVISION, ref: str = "main", **changes: Any
) -> Path:
    """A repository in the layout of the hub's cache: snapshots of links into blobs."""
    repository = root / f"models--{repo.replace('/', '--')}"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / revision
    for folder in (blobs, snapshot, repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / ref).write_text(revision)
    source = checkpoint(root.parent / "made", **changes)
    for file in list(source.iterdir()):
        blob = blobs / f"{revision[:4]}-{file.name}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.fixture
def listed(capsys: pytest.CaptureFixture[str]) -> Any:
    """The rows that ``treadle models`` prints as JSON, by model."""

    def run(*arguments: str) -> dict[str, dict[str, Any]]:
        capsys.readouterr()  # what the test itself has printed
        with pytest.raises(SystemExit) as ended:
            main(["models", "--json", *arguments])
        captured = capsys.readouterr()
        assert (ended.value.code, captured.err) == (0, "")
        return {row["model"]: row for row in json.loads(captured.out)}

    return run


def test_a_folder_that_is_a_model(listed: Any, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "one")
    assert listed(str(folder)) == {
        str(folder): {
            "model": str(folder),
            "path": str(folder),
            "architecture": "Qwen3ForCausalLM",
            "bytes": (folder / "model.safetensors").stat().st_size,
            "parameters": 1024,
            "dtype": "bfloat16",
            "context": 256,
            "quantization": None,
            "plugin": "treadle-qwen 0.1.0",
            "problem": None,
        }
    }


def test_what_transformers_writes(listed: Any, tmp_path: Path) -> None:
    from treadle.testing.checkpoints import make_checkpoint

    make_checkpoint(tmp_path / "llama", shard_size="60KB")
    (row,) = listed(str(tmp_path)).values()
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 1
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    assert row["parameters"] == sum(p.numel() for p in model.parameters())
    assert (row["dtype"], row["context"], row["problem"]) == ("float32", 256, None)


def test_a_folder_of_models_and_the_demo(listed: Any, tmp_path: Path) -> None:
    checkpoint(tmp_path / "a")
    checkpoint(tmp_path / "org" / "b")
    checkpoint(tmp_path / ".hidden" / "c")
    rows = listed(str(tmp_path), "demo:")
    assert list(rows) == [str(tmp_path / "a"), str(tmp_path / "org" / "b"), DEMO]
    assert rows[DEMO]["problem"] is None and rows[DEMO]["parameters"] > 10**6


def test_the_hub_cache(listed: Any, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    cache(hub, "org/model")
    cache(hub, "org/model", "f" * 40, "older", max_position_embeddings=99)
    cache(hub, "alone", torch_dtype="float16")
    (hub / "datasets--org--data" / "snapshots" / REVISION).mkdir(parents=True)
    rows = listed("--cache-dir", str(hub))
    assert {"org/model", "alone"} <= set(rows) and "org/data" not in rows
    assert rows["org/model"]["context"] == 256, "not the revision of main"
    assert rows["org/model"]["path"].endswith(REVISION)
    assert rows["org/model"]["bytes"] > 2048 and rows["org/model"]["problem"] is None
    assert rows["alone"]["dtype"] == "float16"
    assert set(listed("--cache-dir", str(hub), "demo:")) == {"org/model", "alone", DEMO}


def test_a_cache_that_is_not_there_is_empty(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "none")}
    command = [sys.executable, "-m", "treadle_cli", "models", "--json"]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert [row["model"] for row in json.loads(process.stdout)] == [DEMO]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["OddForCausalLM"]}, "no plugin provides models:OddForCausalLM"),
        ({"architectures": ["MambaForCausalLM"]}, "it keeps a state for each sequence"),
        ({"architectures": None}, "names no architecture"),
        ({"quantization_config": {"quant_method": "odd"}}, "no plugin provides quantization:odd"),
        ({"quantization_config": {}}, "no plugin provides quantization:unknown"),
    ],
)
def test_what_no_plugin_runs(
    listed: Any, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    (row,) = listed(str(checkpoint(tmp_path / "m", **changes))).values()
    assert problem in row["problem"]


def test_the_name_of_the_demo_is_one_that_can_be_served(listed: Any) -> None:
    from treadle.loading import parse_ref

    (name,) = listed("demo:")
    assert (parse_ref(name).scheme, parse_ref(name).path) == ("demo", "treadle-demo")


def test_quantized(listed: Any, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", quantization_config={"quant_method": "awq", "bits": 4})
    (row,) = listed(str(folder)).values()
    assert (row["quantization"], row["parameters"]) == ("awq", None)


def test_the_language_model_of_several_parts(listed: Any, tmp_path: Path) -> None:
    text = {
        "max_position_embeddings": 1000,
        "dtype": "float16",
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1000,
        },
    }
    folder = checkpoint(tmp_path / "m", text_config=text, max_position_embeddings=5)
    (row,) = listed(str(folder)).values()
    assert (row["context"], row["dtype"]) == (4000, "float16")


def damage_config(folder: Path) -> str:
    (folder / "config.json").write_text("{")
    return "config.json: cannot read"


def damage_list(folder: Path) -> str:
    (folder / "config.json").write_text("[1]")
    return "not an object"


def no_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "no weight files"


def truncated(folder: Path) -> str:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    return "model.safetensors is damaged"


def no_header(folder: Path) -> str:
    (folder / "model.safetensors").write_bytes(b"\xff" * 40)
    return "model.safetensors is damaged"


def dangling(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("nowhere")
    return "model.safetensors is damaged"


def a_pipe(folder: Path) -> str:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    return "it is a named pipe"


def a_pickle(folder: Path) -> str:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return "pytorch_model.bin is read only with --load-format pt"


def a_shard_is_missing(folder: Path) -> str:
    names = {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return "2 of 3 weight files are missing (model-2.safetensors"


@pytest.mark.parametrize(
    "damage",
    [
        damage_config,
        damage_list,
        no_weights,
        truncated,
        no_header,
        dangling,
        a_pipe,
        a_pickle,
        a_shard_is_missing,
    ],
)
def test_a_damaged_model_is_a_row(listed: Any, tmp_path: Path, damage: Any) -> None:
    folder = checkpoint(tmp_path / "m")
    checkpoint(tmp_path / "n")
    problem = damage(folder)
    broken, intact = listed(str(tmp_path)).values()
    assert problem in broken["problem"] and intact["problem"] is None


def test_odd_configurations_do_not_end_the_list(listed: Any, tmp_path: Path) -> None:
    for i, value in enumerate([None, [], {}, "x", -1, 1e400, True]):
        changes = {name: value for name in (*TINY, "quantization_config", "rope_scaling")}
        checkpoint(tmp_path / str(i), **changes, text_config={"max_position_embeddings": value})
    assert len(listed(str(tmp_path))) == 7


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("nowhere", "nowhere does not exist; give a folder"),
        (__file__, "is a file; give a folder"),
        ("hf:org/name", "is listed without arguments"),
        ("demo:other", "there is no demo model 'other'"),
        ("odd:x", "no plugin provides model_sources:odd"),
        ("--cache-dir=nowhere", "--cache-dir nowhere is no folder of a cache"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], argument: str, message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["models", argument])
    error = capsys.readouterr().err
    assert ended.value.code in (1, 2) and message in error and error.count("\n") == 1


def test_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    checkpoint(tmp_path / "a")
    checkpoint(tmp_path / "b", architectures=["OddForCausalLM"])
    with pytest.raises(SystemExit):
        main(["models", str(tmp_path)])
    head, good, bad = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "MODEL",
        "ARCHITECTURE",
        "SIZE",
        "PARAMETERS",
        "DTYPE",
        "CONTEXT",
        "QUANTIZATION",
        "RUNS",
    ]
    assert good.startswith(str(tmp_path / "a")) and good.endswith("treadle-qwen 0.1.0")
    assert "no: no plugin provides models:OddForCausalLM" in bad
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit):
        main(["models", str(tmp_path / "empty")])
    assert capsys.readouterr().out == "no models found\n"


PROBE = """
import sys
from treadle_cli.main import main
try:
    main(["models", *sys.argv[1:]])
finally:
    heavy = {"torch", "transformers", "treadle_qwen", "treadle_llama"} & set(sys.modules)
    sys.exit(f"imported {heavy}" if heavy else 0)
"""


def test_it_imports_neither_torch_nor_a_model(tmp_path: Path) -> None:
    for i in range(20):
        checkpoint(tmp_path / str(i))
    command = [sys.executable, "-c", PROBE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("treadle-qwen") == 20
