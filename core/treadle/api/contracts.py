"""What can be called on an object of a plugin: the members of protocols and data classes.

Annotations of the contract are texts, because nothing that they name is imported for them.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple

__all__ = ("FUNCTION", "Member", "attributes", "implements", "is_protocol", "members")

FUNCTION = re.compile(r"Callable\[(?:\[.*\]|\.\.\.), (.+)\]")
"""The annotation of a function; group 1 is what it returns."""


class Member(NamedTuple):
    """One method, property or callable field of the contract; ``returns`` is its annotation."""

    name: str
    key: str
    returns: str
    is_property: bool


def is_protocol(contract: type) -> bool:
    """Return whether the boundary may stand for an object: of a protocol, not of a data class."""
    return bool(getattr(contract, "_is_protocol", False))


@cache
def members(contract: type) -> tuple[Member, ...]:
    """Return the public members of a contract, those of the protocols that it extends first."""
    if is_dataclass(contract):
        functions = ((f.name, FUNCTION.fullmatch(str(f.type))) for f in fields(contract))
        return tuple(
            Member(name, f"{contract.__name__}.{name}", match[1], False)
            for name, match in functions
            if match
        )
    methods: dict[str, Member] = {}
    for base in filter(is_protocol, reversed(contract.__mro__)):
        for name, member in vars(base).items():
            function = member.fget if isinstance(member, property) else member
            if inspect.isfunction(function) and not name.startswith("_"):  # the rest is data
                return_type = str(function.__annotations__.get("return", "None"))
                is_property = isinstance(member, property)
                methods[name] = Member(name, function.__qualname__, return_type, is_property)
    return tuple(methods.values())


@cache
def attributes(contract: type) -> frozenset[str]:
    """Return the names of a protocol's public data, those of the protocols that it extends included."""
    annotations = map(inspect.get_annotations, filter(is_protocol, contract.__mro__))
    return frozenset(name for names in annotations for name in names if not name.startswith("_"))


def implements(instance: Any, contract: type) -> bool:
    """Return whether an object has an optional protocol. Its properties are not run."""
    return all(
        inspect.getattr_static(instance, member.name, None) is not None
        if member.is_property
        else hasattr(instance, member.name)
        for member in members(contract)
    )
