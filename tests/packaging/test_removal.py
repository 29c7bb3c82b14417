"""Remove any one distribution, and everything that does not need it still works.

A removed distribution is really absent: each test runs in a process whose site folder is a copy,
made of links, of this environment's without the files that the distribution has installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from repository import Member, kits, members, plugins

pytestmark = pytest.mark.early

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
# Architectures to generate with: the first whose plugin is not the removed one.
CANDIDATES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2"}

# What a model on a CPU needs beside the core: layers, what starts and loads it, and a backend for
# attention, which is a plugin.
CPU_ATTENTION = "treadle-sdpa"
OF_EVERY_MODEL = (
    *("treadle-layers-kit", "treadle-paged-attention-kit"),
    *("treadle-triton-kit", "treadle-worker-kit"),
)
# What reads or runs any checkpoint, and options with which an engine needs it.
BASIC: dict[str, dict[str, str]] = {
    "treadle-dummy": {},
    "treadle-executor-uni": {},
    "treadle-hf": {"model": "org/name"},
    "treadle-hf-tokenizer": {},
    "treadle-jinja": {},
    "treadle-pt": {"load_format": "pt"},
    "treadle-safetensors": {"load_format": "safetensors"},
}

GENERATE = """
import json, sys
from treadle import LLM, SamplingParams
from treadle.plugins import PluginManager

gone = sys.argv[1]
assert gone not in {entry.dist for entry in PluginManager().entries}
options = dict(model=sys.argv[2], load_format="dummy", device="cpu", num_pages=16, max_num_seqs=2)
options |= json.loads(sys.argv[3])
with LLM(**options) as llm:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    (output,) = llm.generate("abc", params)
    print(len(output.outputs[0].token_ids))
"""

LIST = """
import json, os, site, sys
from treadle_cli.main import main
paths = json.loads(sys.argv[1])
for folder in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        sys.path[:] = paths
        site.addsitedir(folder)
        main(["plugin", "list", "--json"])
    _, status = os.waitpid(child, 0)
    assert status == 0, folder
    print("===", flush=True)
"""


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def without(member: Member, folder: Path, *more: Member) -> Path:
    """Make a site folder that has everything but ``member`` and ``more``."""
    site = folder / "site"
    site.mkdir()
    excluded: set[str] = set()
    for removed in (member, *more):
        files = metadata.distribution(removed.name).files or []
        top_level = {file.parts[0] for file in files if file.parts[0] != ".."}
        assert top_level, f"{removed.name} is not installed; see CONTRIBUTING.md"
        excluded |= top_level
    site_packages = Path(str(metadata.distribution(member.name).locate_file("")))
    for path in site_packages.iterdir():
        if path.name not in excluded:
            (site / path.name).symlink_to(path)
    return site


@cache
def standard_library() -> list[str]:
    command = [sys.executable, "-I", "-S", "-c", "import sys, json; print(json.dumps(sys.path))"]
    path: list[str] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return path


@pytest.fixture
def run(preloaded: list[str]) -> Run:
    """``run(site, program, …)``: a program that sees the standard library and ``site``, editable
    members included."""

    def run(site: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        start = f"import site, sys; sys.path[:] = {standard_library()}; site.addsitedir({str(site)!r})\n"
        command = [*preloaded, "-c", start + program, *arguments]
        return subprocess.run(
            command, cwd=site.parent, capture_output=True, text=True, timeout=120, check=False
        )

    return run


def checkpoint(folder: Path, removed: Member) -> Path:
    """A tiny model of an architecture that ``removed`` does not provide; weights are random."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    served = {e.key for m in plugins() if m.name != removed.name for e in m.entry_points}
    architecture = next(name for name in CANDIDATES if name in served)
    root = folder / "model"
    root.mkdir()
    config = {"architectures": [architecture], "model_type": CANDIDATES[architecture], **SIZES}
    (root / "config.json").write_text(json.dumps(config))
    alphabet = ["<|end|>", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.save(str(root / "tokenizer.json"))
    return root


def by_folder() -> dict[str, list[Member]]:
    groups: dict[str, list[Member]] = {}
    for member in plugins():
        groups.setdefault(member.folder.parent.name, []).append(member)
    return groups


@pytest.mark.parametrize("group", by_folder().values(), ids=by_folder())
def test_the_other_plugins_are_listed(group: list[Member], tmp_path: Path, run: Run) -> None:
    """In a fork for each that is removed, of a process that has imported no plugin."""
    sites = []
    for member in group:
        (tmp_path / member.name).mkdir()
        sites.append(without(member, tmp_path / member.name))
    process = run(sites[0], LIST, json.dumps(standard_library()), *map(str, sites))
    assert process.returncode == 0, process.stderr
    for member, listing in zip(group, process.stdout.split("===\n"), strict=False):
        listed = {row["distribution"] for row in json.loads(listing)}
        assert listed == {m.name for m in members() if m.name != member.name and m.entry_points}


def by_cost() -> Iterator[Any]:
    """All models and the first plugin of each other group; a process with torch takes seconds, so
    the rest is ``slow``."""
    groups: set[str] = set()
    for member in plugins():
        if member.name == CPU_ATTENTION or not BASIC.get(member.name, {"not": "needed"}):
            continue  # nothing generates without it
        group = member.folder.parent.name
        costly = group != "models" and group in groups
        groups.add(group)
        yield pytest.param(member, id=member.name, marks=[pytest.mark.slow] if costly else [])


@pytest.mark.parametrize("member", list(by_cost()))
def test_another_architecture_generates(member: Member, tmp_path: Path, run: Run) -> None:
    model = checkpoint(tmp_path, member)
    process = run(without(member, tmp_path), GENERATE, member.name, str(model), "{}")
    assert process.returncode == 0, process.stderr
    assert process.stdout.split()[-1] == "4"


@pytest.mark.parametrize(
    "name",
    [
        "treadle-server",
        "treadle-cli",
        "treadle-fp8-kit",
        *(
            pytest.param(kit.name, marks=pytest.mark.slow)
            for kit in kits()
            if kit.name not in ("treadle-fp8-kit", *OF_EVERY_MODEL)
        ),
    ],
)
def test_the_engine_needs_no_server_no_command_line_and_no_other_kit(
    name: str, tmp_path: Path, run: Run
) -> None:
    (member,) = (m for m in members() if m.name == name)
    model = checkpoint(tmp_path, member)
    process = run(without(member, tmp_path), GENERATE, name, str(model), "{}")
    assert process.returncode == 0, process.stderr


def test_without_attention_for_the_device_the_error_says_what_to_install(
    tmp_path: Path, run: Run
) -> None:
    (member,) = (m for m in members() if m.name == CPU_ATTENTION)
    process = run(
        without(member, tmp_path), GENERATE, member.name, str(checkpoint(tmp_path, member)), "{}"
    )
    assert process.returncode != 0
    assert "triton: device 'cpu'" in process.stderr, "what is there says why it cannot"
    assert process.stderr.splitlines()[-1] == (
        "  not installed: treadle-sdpa; from a clone: pip install './kits/paged_attention' "
        "'./plugins/backends/attention/sdpa'"
    )


def removed_llama(run: Run, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Generate with a Llama where ``treadle-llama`` and ``more`` are not installed."""
    named = {m.name: m for m in plugins()}
    model = checkpoint(folder, named["treadle-qwen"])
    assert "LlamaForCausalLM" in (model / "config.json").read_text()
    site = without(named["treadle-llama"], folder, *(named[name] for name in more))
    return run(site, GENERATE, "treadle-llama", str(model), "{}")


def test_the_fallback_takes_over_a_removed_architecture(tmp_path: Path, run: Run) -> None:
    process = removed_llama(run, tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split()[-1] == "4"


def test_a_removed_architecture_is_reported_with_what_to_install(tmp_path: Path, run: Run) -> None:
    """The absence is real, and the message names the distribution to install."""
    process = removed_llama(run, tmp_path, "treadle-transformers")
    assert process.returncode != 0
    assert "./plugins/models/llama" in process.stderr.splitlines()[-1], process.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n == "treadle-pt" else []) for n in BASIC]
)
def test_without_what_reads_a_checkpoint_the_error_says_what_to_install(
    name: str, tmp_path: Path, run: Run
) -> None:
    (member,) = (m for m in plugins() if m.name == name)
    model = checkpoint(tmp_path, member)
    process = run(without(member, tmp_path), GENERATE, name, str(model), json.dumps(BASIC[name]))
    assert process.returncode != 0
    last = process.stderr.splitlines()[-1]
    assert "from a clone: pip install " in last and f"'./{member.path}'" in last, process.stderr
