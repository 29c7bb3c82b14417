"""The rules of CONTRIBUTING.md that a program can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from repository import ROOT, Hook, Member, hooks, kits, members, plugins, python_files, shipped

LONGEST_FILE = 500

# What a plugin or a kit may import of treadle. Anything else is the inside of the core.
CONTRACT = ("treadle.api", "treadle.errors", "treadle.testing")

# What a plugin may import of the server, if it depends on it.
SERVER_CONTRACT = ("treadle_server.surfaces", "treadle_server.hookspecs")

# Plugins and kits that may import more, and what. Each line is a hole in the contract: keep it short.
ALLOWANCES: dict[str, frozenset[str]] = {
    # A rank loads a model for the core's own runner, and captures its steps; commands carry the
    # configuration and chosen plugins. All executors start their ranks with this kit.
    "treadle_worker_kit": frozenset(
        {
            "treadle.config",
            "treadle.loading",
            "treadle.known_plugins",
            "treadle.loading.formats",
            "treadle.loading.matching",
            "treadle.loading.config",
            "treadle.plugins",
            "treadle.runner.attention",
            "treadle.runner.inputs",
            "treadle.runner.model_runner",
            "treadle.runner.outputs",
            "treadle.sampling.features",
            "treadle.sampling.sampler",
        }
    ),
    # Sequences of many rows advance in processes, which nothing in the engine's interpreter holds up.
    "treadle_structured_output_kit": frozenset(
        {"treadle.processes.framing", "treadle.processes.spawn"}
    ),
    "treadle_executor_uni": frozenset({"treadle.config", "treadle.runner.model_runner"}),
    "treadle_executor_mp": frozenset(
        {"treadle.config", "treadle.processes.lifeline", "treadle.processes.spawn"}
    ),
    "treadle_executor_ray": frozenset({"treadle.config"}),
    # What is installed is asked of metadata, and a download is that of a start.
    "treadle_command_models": frozenset({"treadle.loading", "treadle.plugins"}),
    # A checkpoint is read as a start reads it.
    "treadle_command_quantize": frozenset(
        {"treadle.loading", "treadle.loading.formats", "treadle.plugins"}
    ),
}

# What the conformance suites of ``treadle.testing`` import beside the core: a model plugin is checked with
# the loader that all executors use. Whoever can run a model has it.
KITS_OF_SUITES = {"treadle_layers_kit", "treadle_worker_kit"}

# Modules that may read the environment beside treadle/config.py, relative to the root.
ENVIRONMENT = {"core/treadle/config.py"}

# Modules too heavy to import before a plugin is asked for something.
HEAVY = (
    "torch",
    "transformers",
    "litestar",
    "numpy",
    "triton",
    "outlines",
    "lmformatenforcer",
    "ray",
    "xformers",
    "flashinfer",
    "opentelemetry",
)

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec"}

# Rows of the table of keys in a plugin's README: | `awq` | `treadle.quantization` | …, or
# | `quantization:awq` | …
KEY_ROW = re.compile(r"^\|\s*`([^`]+)`\s*\|\s*`treadle\.(\w+)`\s*\|", re.MULTILINE)
ID_ROW = re.compile(r"^\|\s*`(\w+:[^`]+)`\s*\|", re.MULTILINE)

SHIPPED = [path for member in members() for path in shipped(member)]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def offences(check: Callable[[Path], Iterator[str]], paths: list[Path] = SHIPPED) -> list[str]:
    return [f"{relative(path)}:{problem}" for path in paths for problem in check(path)]


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a chain of names, ``""`` of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Yield ``(line, module)`` for each absolute import, wherever it stands."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module == "treadle":  # from treadle import errors
                yield from ((node.lineno, home(alias.name)) for alias in node.names)
            else:
                yield node.lineno, node.module


def home(name: str) -> str:
    """Where ``from treadle import name`` takes it from: a module of the core, or its public names."""
    module = ROOT / "core/treadle" / name
    return f"treadle.{name}" if module.is_dir() or module.with_suffix(".py").exists() else "treadle"


# ------------------------------------------------------------------------------ the source


def test_no_file_is_longer_than_500_lines() -> None:
    lengths = {relative(p): len(p.read_text().splitlines()) for p in python_files()}
    assert {path: n for path, n in lengths.items() if n > LONGEST_FILE} == {}


def test_no_assert_checks_anything_in_shipped_code() -> None:
    def check(path: Path) -> Iterator[str]:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Assert):
                yield f"{node.lineno} assert vanishes under -O; raise an error of treadle.errors"

    outside = [p for p in SHIPPED if p.parent.name != "testing"]
    assert offences(check, outside) == []


def test_the_environment_is_read_in_one_module() -> None:
    def check(path: Path) -> Iterator[str]:
        written = {
            id(node.value)
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
        }
        for node in ast.walk(tree(path)):
            if (
                isinstance(node, ast.Attribute)
                and id(node) not in written
                and (name := dotted(node)) in ("os.environ", "os.getenv", "os.environb")
            ):
                yield f"{node.lineno} {name}; add it to treadle.config"
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                names = {alias.name for alias in node.names} & {"environ", "getenv", "environb"}
                yield from (f"{node.lineno} from os import {name}" for name in names)

    assert offences(check, [p for p in SHIPPED if relative(p) not in ENVIRONMENT]) == []


def test_nothing_runs_code_from_data() -> None:
    def check(path: Path) -> Iterator[str]:
        for line, module in imported(path):
            if module.partition(".")[0] in UNSAFE_MODULES:
                yield f"{line} import {module}"
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call):
                called = dotted(node.func)
                if called in UNSAFE_CALLS:
                    yield f"{node.lineno} {called}()"
                if called == "torch.load" and not loads_weights_only(node):
                    yield f"{node.lineno} torch.load without weights_only=True"
                if any(k.arg == "trust_remote_code" and is_true(k.value) for k in node.keywords):
                    yield f"{node.lineno} trust_remote_code=True"

    assert offences(check) == []


def loads_weights_only(call: ast.Call) -> bool:
    return any(k.arg == "weights_only" and is_true(k.value) for k in call.keywords)


def is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def test_public_classes_are_named_for_what_they_are() -> None:
    def check(path: Path) -> Iterator[str]:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                for ending in ("Base", "Util", "Utils", "Helper", "Impl", "Interface"):
                    if node.name.endswith(ending):
                        yield f"{node.lineno} class {node.name} says how it is made, not what it is"

    assert offences(check) == []


def test_no_retired_name_returns() -> None:
    """``tests/retired_names.txt`` lists names that better ones have replaced."""
    retired = frozenset((ROOT / "tests/retired_names.txt").read_text().split())

    def check(path: Path) -> Iterator[str]:
        for node in ast.walk(tree(path)):
            for name in identifiers(node):
                if name in retired:
                    yield f"{relative(path)}:{getattr(node, 'lineno', 0)}: {name}"

    assert offences(check) == []


def identifiers(node: ast.AST) -> Iterator[str]:
    """The names that a node defines or uses."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name


def test_every_module_says_why_it_exists() -> None:
    silent = [relative(p) for p in SHIPPED if tree(p).body and not ast.get_docstring(tree(p))]
    assert silent == []


# ----------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("member", [*kits(), *plugins()], ids=lambda m: m.name)
def test_a_plugin_imports_only_the_contract_and_its_kits(member: Member) -> None:
    allowed = ALLOWANCES.get(member.package.name, frozenset())
    packages = {member.package.name}
    packages |= {kit.package.name for kit in kits() if kit.name in member.dependencies}

    def check(path: Path) -> Iterator[str]:
        for line, module in imported(path):
            is_core = module.startswith("treadle.")
            contract = module.startswith(tuple(f"{m}." for m in CONTRACT)) or module in CONTRACT
            if is_core and not contract and module not in allowed:
                yield f"{line} imports {module}"
            package = module.partition(".")[0]
            if module in SERVER_CONTRACT and "treadle-server" in member.dependencies:
                continue
            if package.startswith("treadle_") and package not in packages:
                yield f"{line} imports {module}, which is neither its own nor a kit it depends on"

    assert offences(check, list(shipped(member))) == []


@pytest.mark.parametrize("member", [*kits(), *plugins()], ids=lambda m: m.name)
def test_every_kit_that_it_depends_on_is_imported(member: Member) -> None:
    tops = {m.partition(".")[0] for path in shipped(member) for _, m in imported(path)}
    needed = {kit.package.name for kit in kits() if kit.name in member.dependencies}
    assert needed <= tops, f"{member.name} does not import {needed - tops}"


@pytest.mark.parametrize("kit", kits(), ids=lambda m: m.name)
def test_a_kit_declares_no_entry_points(kit: Member) -> None:
    assert "entry-points" not in kit.pyproject["project"]


def test_several_plugins_need_each_kit() -> None:
    for kit in kits():
        users = [member.name for member in plugins() if kit.name in member.dependencies]
        assert len(users) > 1, f"{kit.name} is needed by {users}: it belongs into the plugin"


def test_every_allowance_is_used() -> None:
    for package, modules in ALLOWANCES.items():
        (member,) = (m for m in members() if m.package.name == package)
        used = {module for path in shipped(member) for _, module in imported(path)}
        assert modules <= used, f"{package} no longer imports {modules - used}"


@pytest.mark.parametrize("name", ["treadle-core", "treadle-server", "treadle-cli"])
def test_core_server_and_command_line_import_no_plugin_and_no_undeclared_kit(name: str) -> None:
    """The core depends on no kit; its conformance suites, which no part of it imports, use one."""
    (member,) = (m for m in members() if m.name == name)
    packages = {m.package.name for m in (*kits(), *plugins())}
    packages -= {kit.package.name for kit in kits() if kit.name in member.dependencies}

    def check(path: Path) -> Iterator[str]:
        is_suite = path.is_relative_to(ROOT / "core/treadle/testing")
        for line, module in imported(path):
            package = module.partition(".")[0]
            if package in packages - (KITS_OF_SUITES if is_suite else set()):
                yield f"{line} imports {module}"

    assert offences(check, list(shipped(member))) == []


def test_the_core_depends_on_no_other_member() -> None:
    (core,) = (m for m in members() if m.name == "treadle-core")
    assert core.dependencies & {member.name for member in members()} == set()


def test_core_knows_neither_server_nor_command_line() -> None:
    def check(path: Path) -> Iterator[str]:
        for line, module in imported(path):
            top = module.partition(".")[0]
            if top in ("treadle_server", "treadle_cli", "litestar", "uvicorn", "typer"):
                yield f"{line} imports {module}"

    (core,) = (m for m in members() if m.name == "treadle-core")
    assert offences(check, list(shipped(core))) == []


PROBE = """
import importlib, sys
heavy = sys.argv[1].split(",")
for name in sys.argv[2:]:
    importlib.import_module(name)
    imported = [h for h in heavy if h in sys.modules]
    if imported:
        sys.exit(f"{name} imports {', '.join(imported)}")
"""


def probe(modules: list[str], heavy: tuple[str, ...] = HEAVY) -> str:
    command = [sys.executable, "-c", PROBE, ",".join(heavy), *modules]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_the_probe_for_heavy_imports_can_fail() -> None:
    assert "imports json" in probe(["json.decoder"], ("json",))


def test_entry_point_modules_import_nothing_heavy() -> None:
    modules = {e.module for member in members() for e in member.entry_points}
    assert (
        probe(["treadle", "treadle.api", "treadle.config", "treadle.plugins", *sorted(modules)])
        == ""
    )


# ------------------------------------------------------------------------------- the members


def test_the_three_fixed_members_exist() -> None:
    assert {"treadle-core", "treadle-server", "treadle-cli"} <= {
        member.name for member in members()
    }


@pytest.mark.parametrize("member", members(), ids=lambda m: m.name)
class TestMember:
    def test_it_has_a_readme_a_package_and_types(self, member: Member) -> None:
        for required in (member.folder / "README.md", member.package / "py.typed"):
            assert required.is_file(), relative(required)
        assert len((member.folder / "README.md").read_text().split()) >= 10, "an empty README"

    def test_it_has_the_shared_version_and_licence(self, member: Member) -> None:
        root = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert member.version == root["version"]
        assert member.pyproject["project"]["license"] == root["license"]
        assert member.pyproject["project"]["requires-python"] == root["requires-python"]

    def test_it_asks_for_a_range_of_the_core(self, member: Member) -> None:
        if member.name == "treadle-core":
            return
        major, minor, _ = member.version.split(".")
        dependency = f"treadle-core>={major}.{minor},<{major}.{int(minor) + 1}"
        assert dependency in member.pyproject["project"]["dependencies"]

    def test_it_never_pins_torch(self, member: Member) -> None:
        needs = member.pyproject["project"].get("dependencies", [])
        assert [n for n in needs if n.startswith("torch") and "==" in n] == []
        assert [n for n in needs if n.startswith("triton")] == [], "torch brings its own triton"


@pytest.mark.parametrize("member", plugins(), ids=lambda m: m.name)
class TestPlugin:
    def test_its_readme_names_exactly_its_keys(self, member: Member) -> None:
        readme = (member.folder / "README.md").read_text()
        named = {f"{kind}:{key}" for key, kind in KEY_ROW.findall(readme)}
        named |= set(ID_ROW.findall(readme))
        assert named == {e.id for e in member.entry_points}

    def test_its_entry_points_lead_to_its_own_modules(self, member: Member) -> None:
        assert member.entry_points, "a plugin without an entry point is never found"
        for entry in member.entry_points:
            module = member.folder / Path(*entry.module.split("."))
            assert entry.module.split(".")[0] == member.package.name
            assert module.is_dir() or module.with_suffix(".py").is_file(), entry.module


def test_no_two_members_claim_one_key() -> None:
    owners: dict[str, list[str]] = {}
    for member in members():
        for entry in member.entry_points:
            if entry.kind != "overrides":
                owners.setdefault(entry.id, []).append(member.name)
    assert {key: names for key, names in owners.items() if len(names) > 1} == {}


def test_treadle_says_the_version_of_its_distribution() -> None:
    import treadle

    root = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert treadle.__version__ == root["version"]


# --------------------------------------------------------------------------------- the hooks


@cache
def words_of_tests() -> frozenset[str]:
    mine = Path(__file__)
    paths = (path for path in (ROOT / "tests").rglob("*.py") if path != mine)
    return frozenset(word for path in paths for word in re.findall(r"\w+", path.read_text()))


def test_the_hooks_read_from_the_source_are_those_of_pluggy() -> None:
    from treadle.api.hookspecs import AllResultsHooks, FirstResultHooks

    real = {
        name
        for spec in (FirstResultHooks, AllResultsHooks)
        for name in vars(spec)
        if name.startswith("treadle_")
    }
    assert {hook.name for hook in hooks() if hook.owner == "treadle-core"} == real


@pytest.mark.parametrize("hook", hooks(), ids=lambda h: h.name)
def test_every_hook_has_a_test(hook: Hook) -> None:
    assert hook.name in words_of_tests(), f"no test under tests/ names {hook.name}"
