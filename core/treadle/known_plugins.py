"""Which distribution of treadle provides which key, and where its source lies in a clone."""

from __future__ import annotations

from importlib.resources import files

import msgspec
from packaging.utils import canonicalize_name

from treadle.config import environment

__all__ = (
    "ALWAYS_ALLOWED",
    "DISTRIBUTIONS",
    "DISTRIBUTION_OF_KEY",
    "KITS",
    "install_hint",
    "known_distributions",
    "known_keys",
    "may_import",
)


class _Table(msgspec.Struct, frozen=True):
    """The content of ``known_plugins.json``, which tools/known_plugins.py writes."""

    keys: dict[str, str]
    distributions: dict[str, str]
    kits: dict[str, list[str]]
    always_allowed: list[str]


_TABLE = msgspec.json.decode((files("treadle") / "known_plugins.json").read_bytes(), type=_Table)

DISTRIBUTION_OF_KEY = _TABLE.keys
"""``kind:key`` and the distribution that provides it."""
DISTRIBUTIONS = _TABLE.distributions
"""Distributions and their folders in a clone."""
KITS = _TABLE.kits
"""Distributions and the kits that they depend on."""
ALWAYS_ALLOWED = frozenset(_TABLE.always_allowed)
"""Distributions that no allow-list excludes: without them there is nothing to plug others into, no
model can be read or run, and a CPU has no attention."""


def known_keys(kind: str) -> list[str]:
    """Return the keys of a kind that distributions of treadle provide."""
    return [id.removeprefix(f"{kind}:") for id in DISTRIBUTION_OF_KEY if id.startswith(f"{kind}:")]


def known_distributions(kind: str) -> list[str]:
    """Return the distributions of treadle that provide keys of a kind."""
    return list(dict.fromkeys(DISTRIBUTION_OF_KEY[f"{kind}:{key}"] for key in known_keys(kind)))


def may_import(distribution: str) -> bool:
    """Return whether the environment lets the code of a distribution be imported at all."""
    name, variables = canonicalize_name(distribution), environment()
    disabled, allowed = (
        set(map(canonicalize_name, variables[key])) for key in ("disable", "allow")
    )
    is_chosen = variables["autoload"] and name not in disabled and name in (allowed or {name})
    return is_chosen or name in DISTRIBUTIONS or name in ALWAYS_ALLOWED


def install_hint(*distributions: str) -> str:
    """Return how to install these distributions, with the kits that they depend on.

    Our own are not published, so the command installs them from a clone.
    """
    names = [name.partition("[")[0] for name in distributions]
    if not all(name in DISTRIBUTIONS for name in names):
        return f"pip install {' '.join(distributions)}"
    pairs = zip(names, distributions, strict=True)
    kits = dict.fromkeys(kit for name in names for kit in KITS.get(name, ()))
    folders = [f"'./{DISTRIBUTIONS[kit]}'" for kit in kits]
    folders += [
        f"'./{DISTRIBUTIONS[name]}{distribution[len(name) :]}'" for name, distribution in pairs
    ]
    return f"from a clone: pip install {' '.join(folders)}"
