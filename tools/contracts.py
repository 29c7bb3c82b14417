"""What core and plugins exchange, version by version, and how it has changed.

``docs/data/contracts/VERSION.json`` is the contract of a minor version: hooks with their types,
protocols with their methods, data classes with their fields, and the generation of each kind. The page
*Migrate a plugin* is written from the differences of these files and of the tree.

    python tools/contracts.py            # record the contract of this tree, under its minor version
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from repository import ROOT, Member, hooks

from treadle.api import types
from treadle.api.contracts import is_protocol
from treadle.plugins import PluginKind, installed_kinds

__all__ = ("BLOCKS", "Change", "changes", "contract", "kind_contract", "recorded")

FOLDER = ROOT / "docs/data/contracts"
REQUIRED, OPTIONAL = "is required", "has a default"

Contract = Mapping[str, Mapping[str, Any]]


def contract() -> Contract:
    """Return the contract of this tree: ``hooks``, ``types`` and ``kinds`` by name."""
    found = {name: _members(type_) for name in _names() if (type_ := getattr(types, name, None))}
    kinds = {name: kind_contract(kind) for name, kind in installed_kinds().items()}
    signatures = {h.name: _arguments(h.signature) for h in hooks()}
    return {"hooks": signatures, "types": found, "kinds": kinds}


def kind_contract(kind: PluginKind[Any]) -> Mapping[str, Any]:
    """Return what the contract says of one kind."""
    return {
        "generation": kind.generation,
        **({"adapter_until": f"{kind.owner} {kind.adapter_until}"} if kind.adapter else {}),
        "mode": kind.mode,
        "key_argument": kind.key_argument,
        "hook": kind.hook,
        "types": sorted(_reachable([kind.hook, "treadle_match" if kind.matches else ""])),
        "built": sorted(_built(kind)),
    }


def recorded() -> dict[str, Contract]:
    """Return the contracts of earlier versions, the oldest first."""
    files = sorted(FOLDER.glob("*.json"), key=lambda f: [int(n) for n in f.stem.split(".")])
    return {file.stem: json.loads(file.read_text()) for file in files}


@dataclass(frozen=True)
class Change:
    """One difference. ``is_compatible`` says that a plugin of the older version still works."""

    kinds: tuple[str, ...]
    text: str
    is_compatible: bool


def changes(old: Contract, new: Contract) -> list[Change]:
    """Return what has changed between two contracts, in the order of the names."""
    return [*_hook_changes(old, new), *_type_changes(old, new), *_kind_changes(old, new)]


def _kind_changes(old: Contract, new: Contract) -> Iterator[Change]:
    for name in sorted(old["kinds"].keys() | new["kinds"].keys()):
        before, after = old["kinds"].get(name), new["kinds"].get(name)
        if before is None:
            yield Change((name,), f"The kind `{name}` is new.", True)
        elif after is None:
            yield Change((name,), f"The kind `{name}` is gone.", False)
        else:
            if before["generation"] != after["generation"]:
                text = (
                    f"`{name}` is generation {after['generation']}, before {before['generation']}."
                )
                if until := after.get("adapter_until"):
                    text += (
                        f" Plugins of generation {before['generation']} are called until {until}."
                    )
                yield Change((name,), text, False)
            for field in ("mode", "hook", "key_argument"):
                if before[field] != after[field]:
                    text = f"`{field}` of `{name}` is `{after[field]}`, before `{before[field]}`."
                    yield Change((name,), text, False)


def _hook_changes(old: Contract, new: Contract) -> Iterator[Change]:
    for name in sorted(old["hooks"].keys() | new["hooks"].keys()):
        before, after = old["hooks"].get(name), new["hooks"].get(name)
        kinds = tuple(k for c in (old, new) for k, v in c["kinds"].items() if v["hook"] == name)
        kinds = tuple(dict.fromkeys(kinds))
        if before is None or after is None:
            word = "new" if before is None else "gone"
            yield Change(kinds, f"The hook `{name}` is {word}.", before is None)
            continue
        for argument in sorted(before.keys() | after.keys()):
            was, is_now = before.get(argument), after.get(argument)
            if was == is_now:
                continue
            label = "The result" if argument == "return" else f"The argument `{argument}`"
            if was is None:
                yield Change(kinds, f"{label} of `{name}` is new: `{is_now}`.", True)
            elif is_now is None:
                yield Change(kinds, f"{label} of `{name}` is gone.", False)
            else:
                yield Change(kinds, f"{label} of `{name}` is `{is_now}`, before `{was}`.", False)


def _type_changes(old: Contract, new: Contract) -> Iterator[Change]:
    for name in sorted(old["types"].keys() | new["types"].keys()):
        before, after = old["types"].get(name), new["types"].get(name)
        users = [k for k, v in old["kinds"].items() if name in v["types"]]
        kinds = tuple(sorted(users))
        if before is None or after is None:
            word = "new" if before is None else "gone"
            yield Change(kinds, f"`{name}` is {word}.", before is None)
            continue
        is_built = any(name in v["built"] for v in new["kinds"].values())
        for member in sorted(before.keys() | after.keys()):
            was, is_now = before.get(member), after.get(member)
            if was == is_now:
                continue
            if was is None:
                # Who builds an object must have it; who is given one may ignore it.
                yield Change(
                    kinds,
                    f"`{name}.{member}` is new: `{is_now[0]}`.",
                    not is_built or is_now[1] == OPTIONAL,
                )
            elif is_now is None:
                yield Change(kinds, f"`{name}.{member}` is gone.", False)
            elif was[0] != is_now[0]:
                text = f"`{name}.{member}` is `{is_now[0]}`, before `{was[0]}`."
                yield Change(kinds, text, False)
            else:
                text = f"`{name}.{member}` {is_now[1]}."
                yield Change(kinds, text, is_now[1] == OPTIONAL)


# ------------------------------------------------------------------------- reading the tree


def _names() -> list[str]:
    queue = [name for hook in hooks() for name in re.findall(r"\bt\.(\w+)", hook.signature)]
    queue += [c.__name__ for k in installed_kinds().values() for c in (k.builds, *k.optional) if c]
    return sorted(_closure(queue))


def _closure(names: list[str]) -> set[str]:
    """Return the types of ``treadle.api.types`` that are named, and those that they name."""
    queue, found = list(names), set()
    while queue:
        name = queue.pop()
        type_ = getattr(types, name, None)
        if name in found or type_ is None:
            continue
        found.add(name)
        members = _members(type_).values()
        queue += [n for text, _ in members for n in re.findall(r"\b[A-Z]\w+", text)]
    return found


def _reachable(hook_names: list[str]) -> set[str]:
    signatures = [h.signature for h in hooks() if h.name in hook_names]
    return _closure(re.findall(r"\bt\.(\w+)", "\n".join(signatures)))


def _built(kind: Any) -> set[str]:
    """Return the types that a plugin of a kind builds: those that its results are made of."""
    results: set[str] = set()
    queue = [c.__name__ for c in (kind.builds, *kind.optional) if c is not None]
    while queue:
        name = queue.pop()
        type_ = getattr(types, name, None)
        if name in results or type_ is None:
            continue
        results.add(name)
        for text, _ in _members(type_).values():
            queue += re.findall(r"\b[A-Z]\w+", text.rpartition("->")[2])
    return results


def _members(type_: Any) -> dict[str, list[str]]:
    """Return signature or annotation of each public member, and whether it may be left out."""
    if not inspect.isclass(type_):
        return {"=": [re.sub(r"[\w.]+\.", "", str(type_)), REQUIRED]}
    if is_dataclass(type_):
        return {
            f.name: [str(f.type), REQUIRED if _has_no_default(f) else OPTIONAL]
            for f in fields(type_)
        }
    if not is_protocol(type_):
        return {}
    found: dict[str, list[str]] = {}
    for base in filter(is_protocol, reversed(type_.__mro__)):
        annotations = inspect.get_annotations(base)
        found |= {n: [str(a), REQUIRED] for n, a in annotations.items() if n[0] != "_"}
        for name, value in vars(base).items():
            function: Any = value.fget if isinstance(value, property) else value
            if inspect.isfunction(function) and not name.startswith("_"):
                signature = str(inspect.signature(function)).replace("'", "")
                found[name] = [signature.replace("(self, ", "(").replace("(self)", "()"), REQUIRED]
    return found


def _has_no_default(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _arguments(signature: str) -> dict[str, str]:
    """``{"name": "str", "return": "X"}`` of the text of a hook's signature."""
    body, _, result = signature.partition("(")[2].rpartition(") -> ")
    parts = re.findall(r"(\w+): ((?:[^,\[]|\[[^\]]*\])+)", body)
    return {**{name: text.strip() for name, text in parts}, "return": result}


# ------------------------------------------------------------------------------- the page


def migration() -> str:
    """A section for each version whose contract differs from that of the version before."""
    versions = [*recorded().items(), ("next", contract())]
    sections = []
    for (old_name, old), (name, new) in pairwise(versions):
        found = changes(old, new)
        title = f"## Since {old_name}" if name == "next" else f"## From {old_name} to {name}"
        rows = [_row(change) for change in sorted(found, key=lambda c: c.is_compatible)]
        head = "| Kinds | Change | A plugin must change |\n| --- | --- | --- |\n"
        sections.append(
            f"{title}\n\n" + (head + "".join(rows) if rows else "Nothing has changed.\n")
        )
    return "\n".join(reversed(sections))


def _row(change: Change) -> str:
    kinds = ", ".join(f"`{kind}`" for kind in change.kinds) or "all"
    text = change.text.replace("|", "\\|")
    return f"| {kinds} | {text} | {'' if change.is_compatible else 'yes'} |\n"


BLOCKS = {"migration": migration}


def main() -> None:
    version = ".".join(Member(ROOT / "core").version.split(".")[:2])
    FOLDER.mkdir(parents=True, exist_ok=True)
    file: Path = FOLDER / f"{version}.json"
    file.write_text(json.dumps(contract(), indent=1, sort_keys=True) + "\n")
    print(f"{file.relative_to(ROOT)}: written")


if __name__ == "__main__":
    main()
