"""What is installed, read from metadata: nothing of a plugin is imported here.

One scan of all distributions takes a few milliseconds, so there is no cache to go stale.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.utils import canonicalize_name as normal

from treadle.api.plugin_kind import FALLBACK, OVERRIDES, PluginKind, parse_group
from treadle.plugin_metadata import entry_points, folder_name, identity

__all__ = ("Entry", "State", "check_kind", "normal", "scan")

State = Literal["ready", "loaded", "disabled", "incompatible", "broken"]


@dataclass(slots=True)
class Entry:
    """One declared key. The plugin manager that made it owns it and moves its ``state``.

    ``reason`` explains every state but ``ready`` and ``loaded``, and says that it is ``adapted``, of the
    generation before; ``error`` is what a broken plugin raised. ``file`` is the path of a local file,
    whose ``version`` is a hash. ``generation`` is ``None`` without an entry-point group.
    """

    kind: str
    key: str
    target: str
    dist: str
    version: str
    override: bool = False
    file: str | None = None
    generation: int | None = None
    adapted: bool = False
    state: State = "ready"
    reason: str = ""
    error: BaseException | None = field(default=None, repr=False)

    @property
    def id(self) -> str:
        return f"{self.kind}:{self.key}"

    @property
    def owner(self) -> str:
        """The distribution and its version, for messages."""
        return f"{self.dist} {self.version}"

    @property
    def source(self) -> str:
        """What is imported: the local file, or the module and object of the entry point."""
        return self.file or self.target

    @property
    def plugin(self) -> str:
        """The name of what is imported, which may serve several keys."""
        return f"{self.dist}:{self.source}{':adapted' if self.adapted else ''}"

    @property
    def usable(self) -> bool:
        """Whether it takes part in choosing; a broken plugin does, so that its error is seen."""
        return self.state not in ("disabled", "incompatible")

    def failure(self, method: str, error: BaseException) -> str:
        """The words of every message about a call that failed: who, where, and with what."""
        return f"{self.id} from {self.owner} failed in {method}: {self.error_text(error)}"

    def error_text(self, error: BaseException) -> str:
        """The words of an error, and where in the plugin's own code it came from."""
        top = self.target.partition(":")[0].partition(".")[0]
        text = f"{type(error).__name__}: {error}"
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            path, module = Path(frame.f_code.co_filename), frame.f_globals.get("__name__", "")
            if module.partition(".")[0] == top or str(path) == self.file:
                depth = module.count(".") + 1 + (path.stem == "__init__")
                return f"{text} ({'/'.join(path.parts[-depth:])}, line {line})"
        return f"{text} (through the adapter from v{self.generation})" if self.adapted else text

    def unloaded(self, key: str | None = None) -> Entry:
        """Return the entry as another process begins with it; ``key`` is one that it serves."""
        key = key or self.key
        entry = Entry(self.kind, key, self.target, self.dist, self.version, file=self.file)
        entry.generation, entry.adapted = self.generation, self.adapted
        entry.reason = self.reason if self.adapted else ""
        return entry

    def close(self, state: State, reason: str) -> None:
        """Take the entry out of use, unless it is already, and say why."""
        if self.usable:
            self.state, self.reason = state, reason


def scan() -> Iterator[Entry]:
    """Yield every key declared by an installed distribution. Imports no plugin."""
    seen: set[str] = set()
    for dist in metadata.distributions():
        if (folder := normal(folder_name(dist))) in seen:
            continue  # an earlier folder on sys.path holds another version: that one is imported
        seen.add(folder)
        points = [p for p in entry_points(dist) if parse_group(p.group)]
        if not points:
            continue
        name, version = identity(dist)
        for point in sorted(points, key=lambda p: (p.group, p.name)):
            kind, generation = parse_group(point.group) or ("", 0)
            key, override = point.name, kind == OVERRIDES
            if override:
                kind, _, key = point.name.partition(".")
            entry = Entry(kind, key, point.value, name, version, override, generation=generation)
            if not version:
                entry.close("broken", "its metadata lack a Name or Version; install it again")
            yield entry


def check_kind(entry: Entry, kinds: Mapping[str, PluginKind[object]]) -> None:
    """Close an entry whose kind or generation this treadle does not know."""
    kind = kinds.get(entry.kind)
    if kind is None or not entry.key:
        kind_names = ", ".join(kinds)
        entry.close(
            "incompatible",
            f"unknown kind {entry.kind!r} (known: {kind_names}); a newer treadle, or the distribution "
            "that declares it, may know it",
        )
    elif entry.generation not in (None, *kind.spoken):
        spoken = " and ".join(f"v{n}" for n in kind.spoken)
        text = f"speaks {kind.name} v{entry.generation}, this treadle speaks {spoken}"
        entry.close("incompatible", text)
    elif entry.key == FALLBACK and not kind.has_fallback:
        entry.close("incompatible", f"the kind {kind.name} has no fallback; name a key")
    elif entry.generation in kind.spoken[1:]:
        entry.adapted = True
        until = f"{kind.owner} {kind.adapter_until}"
        entry.reason = (
            f"speaks {kind.name} v{entry.generation}, which {until} will not call any more"
        )
