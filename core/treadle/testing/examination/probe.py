"""The child process of ``treadle doctor``: imports one plugin, and says what that did.

It runs apart because a plugin may hang, crash or start a device while it is imported. The request
comes on standard input, the answer leaves on what was standard output; the plugin's own prints go
to standard error.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator

import msgspec
import pluggy

from treadle.errors import PluginLoadError
from treadle.plugins.entries import Entry
from treadle.plugins.kinds import installed_kinds
from treadle.plugins.loader import PluginLoader
from treadle.plugins.options import declared_options
from treadle.testing.examination.findings import Finding

__all__ = ("HEAVY", "Loaded", "Request", "main")

HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "triton",
    "litestar",
    "tokenizers",
    "outlines",
    "lmformatenforcer",
    "jax",
    "tensorflow",
    "pandas",
    "scipy",
)
"""Modules that a plugin may import in its hooks, and not before."""

SLOW = 1.0
"""Seconds of an import from which it is reported."""

# A command is imported when it is run, so it may bring what it needs.
MAY_BE_HEAVY = frozenset({"commands"})


class Request(msgspec.Struct, frozen=True):
    """The entries of one target."""

    entries: list[Entry]


class Loaded(msgspec.Struct, frozen=True):
    """What the import did. ``findings`` hold for every entry of the target, ``own`` for one id."""

    seconds: float
    findings: list[Finding] = []
    own: dict[str, list[Finding]] = {}
    report: list[str] = []
    """What ``treadle_report`` said."""


def probe(request: Request) -> Loaded:
    """Import and register the plugin of ``request``."""
    loader = PluginLoader(installed_kinds().values())
    first = request.entries[0]
    before = set(sys.modules)
    began = time.perf_counter()
    try:
        plugin = loader.load(first)
    except PluginLoadError:
        seconds = time.perf_counter() - began
        error = first.error or RuntimeError(first.why)
        return Loaded(seconds, [explain(error, first)])
    seconds = time.perf_counter() - began
    kinds = {entry.kind for entry in request.entries}
    found = list(_weight(before, seconds, kinds))
    own = {e.id: list(_hooks(loader, plugin, e)) for e in request.entries}
    return Loaded(seconds, found, own, _report(loader, plugin, first, found))


def explain(error: BaseException, entry: Entry) -> Finding:
    """What an exception of the import means."""
    module = entry.target.partition(":")[0]
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    if any(f.name == "_lazy_init" and f"torch{os.sep}cuda" in f.filename for f in frames):
        return Finding("cuda", f"its import starts CUDA, which failed here: {text}")
    if isinstance(error, ModuleNotFoundError) and error.name:
        if module == error.name or module.startswith(f"{error.name}."):
            return Finding("target", f"there is no module {error.name!r} of {entry.target!r}")
        top = error.name.partition(".")[0]
        return Finding("dependency", f"its import needs the module {top!r}, which is not installed")
    if isinstance(error, AttributeError) and frames and "importlib" in frames[-1].filename:
        return Finding("target", f"{entry.target!r} leads to nothing: {error}")
    if isinstance(error, pluggy.PluginValidationError):  # a wrapper that does not yield
        return Finding("signature", " ".join(str(error).split()))
    if isinstance(error, PluginLoadError):
        said = str(error)
        code = (
            "options" if "TREADLE_OPTIONS" in said else "hook" if "no hook" in said else "signature"
        )
        return Finding(code, said)  # type: ignore[arg-type]
    return Finding("import", entry.error_text(error))


def _weight(before: set[str], seconds: float, kinds: set[str]) -> Iterator[Finding]:
    torch = sys.modules.get("torch")
    if torch is not None and "torch" not in before and torch.cuda.is_initialized():
        yield Finding("cuda", "its import starts CUDA; do it in the hook")
    if kinds <= MAY_BE_HEAVY:
        return
    heavy = [name for name in HEAVY if name in sys.modules and name not in before]
    if heavy:
        names = ", ".join(heavy)
        yield Finding("heavy", f"its import brings {names}; import that inside the hooks")
    if seconds > SLOW:
        yield Finding("slow", f"its import takes {seconds:.1f} s; {SLOW:g} s is long")


def _hooks(loader: PluginLoader, plugin: object, entry: Entry) -> Iterator[Finding]:
    wanted = installed_kinds()[entry.kind].hook
    names = {caller.name for caller in loader.pm.get_hookcallers(plugin) or []}
    if entry.kind != "extensions" and wanted not in names:
        shown = ", ".join(sorted(names))
        yield Finding("hook", f"it implements {shown}, but not {wanted}, the hook of {entry.kind}")
    unused = [
        name for name in declared_options(plugin) if name.partition(":")[0] not in installed_kinds()
    ]
    if unused:
        yield Finding("options", f"TREADLE_OPTIONS names {unused[0]!r}; write kind:key")


def _report(loader: PluginLoader, plugin: object, entry: Entry, found: list[Finding]) -> list[str]:
    if "treadle_report" not in {c.name for c in loader.pm.get_hookcallers(plugin) or []}:
        return []
    try:
        others = [other for other in loader.pm.get_plugins() if other is not plugin]
        lines = loader.pm.subset_hook_caller("treadle_report", others)()
    except Exception as error:  # a plugin may raise anything
        found.append(Finding("import", f"treadle_report raised {type(error).__name__}: {error}"))
        return []
    return [str(line) for line in lines]


def main() -> None:
    """Answer one request and exit without running what the plugin left for the exit."""
    answer = os.dup(1)
    os.dup2(2, 1)
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    done = msgspec.json.encode(probe(request))
    with os.fdopen(answer, "wb") as out:
        out.write(done)
    sys.stderr.flush()
    os._exit(0)
