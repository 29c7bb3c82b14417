"""The child process of ``treadle doctor``: imports one plugin and reports the findings.

It is a separate process because a plugin may hang, crash or initialize a device while it is imported.
It reads the request from standard input and writes the answer to the original standard output; the
plugin's own prints go to standard error.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator

import msgspec
import pluggy

from treadle.api.plugin_options import declared_options
from treadle.errors import PluginLoadError
from treadle.plugins.entries import Entry
from treadle.plugins.kinds import installed_kinds
from treadle.plugins.loader import PluginLoader
from treadle.testing.examination.findings import Finding

__all__ = ("HEAVY", "ImportResult", "Request", "main")

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
"""Seconds above which an import is reported."""

# A command is imported when it is run, so it may bring what it needs.
MAY_BE_HEAVY = frozenset({"commands"})


class Request(msgspec.Struct, frozen=True):
    """The entries of one target."""

    entries: list[Entry]


class ImportResult(msgspec.Struct, frozen=True):
    """The result of an import.

    ``findings`` concern every entry of the target, ``entry_findings`` one id each.
    """

    seconds: float
    findings: list[Finding] = []
    entry_findings: dict[str, list[Finding]] = {}
    report: list[str] = []
    """The lines of ``treadle_report``."""


def probe(request: Request) -> ImportResult:
    """Import and register the plugin of ``request``."""
    loader = PluginLoader(installed_kinds().values())
    first = request.entries[0]
    loaded_modules = set(sys.modules)
    start_time = time.perf_counter()
    try:
        plugin = loader.load(first)
    except PluginLoadError:
        seconds = time.perf_counter() - start_time
        error = first.error or RuntimeError(first.reason)
        return ImportResult(seconds, [explain(error, first)])
    seconds = time.perf_counter() - start_time
    kinds = {entry.kind for entry in request.entries}
    findings = list(_weight(loaded_modules, seconds, kinds))
    entry_findings = {e.id: list(_hooks(loader, plugin, e)) for e in request.entries}
    return ImportResult(seconds, findings, entry_findings, _report(loader, plugin, first, findings))


def explain(error: BaseException, entry: Entry) -> Finding:
    """Return the finding for an exception of the import."""
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
        message = str(error)
        code = (
            "options"
            if "TREADLE_OPTIONS" in message
            else "hook"
            if "no hook" in message
            else "import"
            if "the adapter of" in message
            else "signature"
        )
        return Finding(code, message)  # type: ignore[arg-type]
    return Finding("import", entry.error_text(error))


def _weight(loaded_modules: set[str], seconds: float, kinds: set[str]) -> Iterator[Finding]:
    torch = sys.modules.get("torch")
    if torch is not None and "torch" not in loaded_modules and torch.cuda.is_initialized():
        yield Finding("cuda", "its import starts CUDA; do it in the hook")
    if kinds <= MAY_BE_HEAVY:
        return
    heavy = [name for name in HEAVY if name in sys.modules and name not in loaded_modules]
    if heavy:
        names = ", ".join(heavy)
        yield Finding("heavy", f"its import brings {names}; import that inside the hooks")
    if seconds > SLOW:
        yield Finding("slow", f"its import takes {seconds:.1f} s; {SLOW:g} s is long")


def _hooks(loader: PluginLoader, plugin: object, entry: Entry) -> Iterator[Finding]:
    hook = installed_kinds()[entry.kind].hook
    names = {caller.name for caller in loader.pm.get_hookcallers(plugin) or []}
    if entry.kind != "extensions" and hook not in names:
        hook_names = ", ".join(sorted(names))
        yield Finding(
            "hook", f"it implements {hook_names}, but not {hook}, the hook of {entry.kind}"
        )
    unused = [
        name for name in declared_options(plugin) if name.partition(":")[0] not in installed_kinds()
    ]
    if unused:
        yield Finding("options", f"TREADLE_OPTIONS names {unused[0]!r}; write kind:key")


def _report(
    loader: PluginLoader, plugin: object, entry: Entry, findings: list[Finding]
) -> list[str]:
    if "treadle_report" not in {c.name for c in loader.pm.get_hookcallers(plugin) or []}:
        return []
    try:
        other_plugins = [other for other in loader.pm.get_plugins() if other is not plugin]
        lines = loader.pm.subset_hook_caller("treadle_report", other_plugins)()
    except Exception as error:  # a plugin may raise anything
        findings.append(Finding("import", f"treadle_report raised {type(error).__name__}: {error}"))
        return []
    return [str(line) for line in lines]


def main() -> None:
    """Answer one request and exit without running what the plugin left for the exit."""
    answer = os.dup(1)
    os.dup2(2, 1)
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    reply = msgspec.json.encode(probe(request))
    with os.fdopen(answer, "wb") as out:
        out.write(reply)
    sys.stderr.flush()
    os._exit(0)
