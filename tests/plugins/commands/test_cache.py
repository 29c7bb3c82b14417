"""``treadle list``, ``pull`` and ``rm``: a cache on this machine, filled from a hub on this machine."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from treadle_cli.main import main

sys.path.insert(0, str(Path(__file__).parents[1] / "model_sources"))

from fake_hub import FakeHub, fake_hub

NAME = "org/name"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"w" * 3000,
    "README.md": b"not needed",
}

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(NAME) as hub:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield hub


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run ``treadle`` with a cache in ``tmp_path``: exit code, output, errors."""

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO())
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--cache-dir", str(tmp_path / "hub")])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return command


def test_what_is_pulled_is_listed_and_removed(hub: FakeHub, run: Run, tmp_path: Path) -> None:
    first, second = hub.commit("main", FILES), hub.commit("v2", {**FILES, "config.json": b"{}"})
    code, out, _ = run("pull", NAME)
    folder = Path(out.strip())
    assert code == 0 and folder.name == first
    assert {p.name for p in folder.iterdir()} == FILES.keys() - {"README.md"}
    assert run("pull", NAME, "--revision", "v2")[1].strip().endswith(second)

    (row,) = json.loads(run("list", "--json")[1])
    assert (row["model"], row["revision"]) == (NAME, first) and row["bytes"] > 3000
    head, line = run("list")[1].splitlines()
    assert head.split() == ["MODEL", "REVISION", "SIZE", "MODIFIED"]
    assert line.split()[:3] == [NAME, first[:8], "3"]

    (tmp_path / "hub" / "models--org--other").mkdir()
    assert run("rm", NAME)[0] == 2 and folder.exists(), "nobody was asked"
    code, out, _ = run("rm", NAME, NAME, "--yes")
    assert (code, out) == (0, f"deleted {NAME}, 3 KiB\n")
    assert json.loads(run("list", "--json")[1]) == []
    assert not folder.exists() and (tmp_path / "hub" / "models--org--other").exists()


def test_a_model_that_leads_out_of_the_cache_is_left_alone(
    hub: FakeHub, run: Run, tmp_path: Path
) -> None:
    hub.commit("main", FILES)
    run("pull", NAME)
    place, elsewhere = tmp_path / "hub" / "models--org--name", tmp_path / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    code, _, error = run("rm", NAME, "--yes")
    assert code == 2 and "leads out of the cache" in error and list(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["org/none", "..", "../../etc", "/", "", "datasets--a--b"])
def test_only_what_is_listed_is_removed(hub: FakeHub, run: Run, tmp_path: Path, name: str) -> None:
    hub.commit("main", FILES)
    run("pull", NAME)
    before = sorted(tmp_path.rglob("*"))
    code, _, error = run("rm", NAME, name, "--yes")
    assert code == 2 and f"{name!r} is not in the cache; treadle list" in error
    assert sorted(tmp_path.rglob("*")) == before, "not even the one that is there"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("org/none",), "no folder and no hub checkpoint 'org/none' exists"),
        ((NAME, "--revision", "v9"), f"{NAME!r} has no revision 'v9'"),
        (("what is this?",), "neither an existing folder nor a hub name"),
        (("/",), "/ is a folder of this machine"),
        (("nowhere:x",), "nowhere"),
    ],
)
def test_what_cannot_be_pulled(
    hub: FakeHub, run: Run, arguments: tuple[str, ...], message: str
) -> None:
    hub.commit("main", FILES)
    code, out, error = run("pull", *arguments)
    assert code in (1, 2) and out == "" and message in error and "Traceback" not in error


def test_a_cache_that_is_not_there(run: Run) -> None:
    code, _, error = run("list")
    assert code == 2 and "is no folder of a cache" in error
