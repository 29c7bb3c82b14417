"""Real distributions in a temporary folder: metadata, entry points and modules, as pip leaves them."""

from __future__ import annotations

import gc
import shlex
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from treadle.config import PluginConfig
from treadle.plugins import Entry, PluginManager
from treadle.plugins.entries import scan

# pytest --hypothesis-profile=thorough: what the suite has no time for.
settings.register_profile("short", max_examples=60, deadline=None)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile("short")

SCHEME = """
    from types import SimpleNamespace
    from treadle.api import impl

    @impl
    def treadle_quantization(method, options):
        return SimpleNamespace(name={name!r}, method=method, options=options)
"""


PYTHON = sys.executable
# With less, nobody has frozen anything: Python 3.12 itself begins with 375 objects.
FEW_FROZEN = 1000
# Where the tests start servers, engines and workers.
STARTERS = (
    "cli/test_batch.py",
    "cli/test_bench",
    "cli/test_chat",
    "cli/test_doctor.py",
    "cli/test_generate.py",
    "cli/test_serve.py",
    "compat/",
    "core/entrypoints/",
    "core/structured_output/",
    "deploy/",
    "faults/",
    "kits/test_worker",
    "plugins/backends/executors/",
    "plugins/backends/structured_output/",
    "plugins/quantization/",
    "plugins/tokenizers/",
    "plugins/server/",
    "reliability/",
    "sdks/",
    "server/",
)


class Site:
    """A folder on ``sys.path`` into which tests install distributions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: set[str] = set()
        self.modules: set[str] = set()

    def install(
        self,
        dist: str,
        groups: Mapping[str, Mapping[str, str]],
        code: str | None = None,
        *,
        version: str = "1.0",
        requires: str | None = "treadle-core>=0.1",
        extra: str = "",
    ) -> str:
        """Write one distribution whose module is named after it; return the module's name."""
        module = dist.replace("-", "_")
        info = self.folder / f"{module}-{version}.dist-info"
        info.mkdir()
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n{needs}"
        )
        lines = [
            f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in p.items()) for g, p in groups.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        text = code if code is not None else SCHEME.format(name=dist)
        (self.folder / f"{module}.py").write_text(textwrap.dedent(text) + textwrap.dedent(extra))
        self.names.add(dist)
        self.modules.add(module)
        return module

    def scheme(self, dist: str, *keys: str, override: bool = False, **more: Any) -> str:
        """A distribution with quantization keys."""
        module = dist.replace("-", "_")
        if override:
            groups = {"treadle.overrides": {f"quantization.{key}": module for key in keys}}
        else:
            groups = {"treadle.quantization": {key: module for key in keys}}
        return self.install(dist, groups, **more)

    def scan(self) -> Iterator[Entry]:
        return (entry for entry in scan() if entry.dist in self.names)

    def plugin_manager(self, **options: Any) -> PluginManager:
        """A plugin manager that sees only what the test installed."""
        return PluginManager(PluginConfig(**options), source=self.scan)


def pytest_collection(session: pytest.Session) -> None:
    """Collection makes millions of objects and no garbage."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins early, so that the workers of ``./test`` end together."""
    items.sort(key=lambda item: item.get_closest_marker("early") is None)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """What was collected is never garbage: without this, each look for some takes a second."""
    know_what_is_frozen()
    gc.freeze()
    gc.enable()


def know_what_is_frozen() -> None:
    """Let ``gc`` say whether something is frozen without counting, which takes a third of a second here.

    An engine asks three times when it starts.
    """
    counted, changed = gc.get_freeze_count, {"freeze": gc.freeze, "unfreeze": gc.unfreeze}
    frozen = counted() >= FEW_FROZEN

    def change(name: str) -> None:
        nonlocal frozen
        changed[name]()
        frozen = name == "freeze"

    gc.freeze, gc.unfreeze = partial(change, "freeze"), partial(change, "unfreeze")
    gc.get_freeze_count = lambda: FEW_FROZEN * frozen


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=1, help="runs of each test with a fault_seed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``fault_seed`` moves the moment at which a test makes something go wrong."""
    if "fault_seed" in metafunc.fixturenames:
        metafunc.parametrize("fault_seed", range(metafunc.config.getoption("--seeds")))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for variable in (
        "TREADLE_DISABLED_PLUGINS",
        "TREADLE_PLUGINS",
        "TREADLE_PLUGIN_AUTOLOAD",
        "TREADLE_PLUGIN_STRICT",
    ):
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    installed_site = Site(folder)
    yield installed_site
    for name in [
        m for m in sys.modules if m in installed_site.modules or m.startswith("treadle_local_")
    ]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A command that is ``python`` with ``-c CODE`` or ``-m MODULE``, torch being imported already."""
    program = str(Path(__file__).with_name("preloaded.py"))
    folder = tmp_path_factory.mktemp("preloaded")
    address = str(folder / "socket")
    command = [sys.executable, "-I", "-S", program, "run", address]
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    python.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        server = subprocess.Popen(
            [sys.executable, "-I", program, "serve", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
    yield command
    server.communicate(timeout=60)


@pytest.fixture(scope="module", autouse=True)
def preloaded_children(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes that tests of ``STARTERS`` start begin with torch imported: see ``tests/preloaded.py``."""
    module = request.path.relative_to(Path(__file__).parent).as_posix()
    if not module.startswith(STARTERS) or request.node.get_closest_marker("own_python"):
        yield
        return
    preloaded = request.getfixturevalue("preloaded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(Path(preloaded[-1]).parent / "bin" / "python"))
        yield


@pytest.fixture(autouse=True)
def own_python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For single tests of what a process is to the system: its parent, its memory, what it imports."""
    if sys.executable != PYTHON and request.node.get_closest_marker("own_python"):
        monkeypatch.setattr(sys, "executable", PYTHON)
