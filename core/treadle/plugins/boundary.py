"""The boundary between the core and objects of plugins, made from their protocols.

``wrap`` returns an object with the methods and properties of the protocol. Each converts what the
plugin's own raises into an error naming plugin, method and cause, checks the result, counts and
times the call. What a protocol returns is wrapped too. Everything outside the protocol is the
plugin's own attribute. A class with ``treadle_unguarded = True`` is left as it is: the method of an
unquantized layer, which layers recognize by its class and give kernels.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from time import perf_counter
from typing import Any, NamedTuple, cast

from treadle.api import types
from treadle.api.plugin_kind import MethodRules, unexpected
from treadle.plugins.guard import NOT_CAUGHT, PluginGuard

__all__ = ("wrap",)

Call = Callable[..., Any]

_PLAIN = MethodRules()
_FUNCTION = re.compile(r"Callable\[(?:\[.*\]|\.\.\.), (.+)\]")


def wrap(built: Any, guard: PluginGuard, *, contract: str = "", label: str = "") -> Any:
    """Return ``built``, an object of the plugin of ``guard``, behind the boundary.

    ``contract`` names its protocol or data class, if that is not what the kind builds; ``label``
    names functions that the plugin returns, instead of the method that returned them. Raises the
    error of ``guard`` for something else than the contract.
    """
    kind = guard.kind
    if kind.builds is None:
        return built
    try:
        return _Boundary(guard, label or kind.hook).of(built, contract or kind.builds.__name__)
    except TypeError as error:
        guard.fail(kind.hook, error)


class _Member(NamedTuple):
    """One method, property or callable field of the contract; ``returns`` is its annotation."""

    name: str
    key: str
    returns: str
    is_property: bool


def _is_protocol(contract: type) -> bool:
    return bool(getattr(contract, "_is_protocol", False))


@cache
def _members(contract: type) -> tuple[_Member, ...]:
    if is_dataclass(contract):
        found = ((f.name, _FUNCTION.fullmatch(str(f.type))) for f in fields(contract))
        return tuple(
            _Member(name, f"{contract.__name__}.{name}", match[1], False)
            for name, match in found
            if match
        )
    members = {}
    for base in filter(_is_protocol, reversed(contract.__mro__)):
        for name, member in vars(base).items():
            function = member.fget if isinstance(member, property) else member
            if inspect.isfunction(function) and not name.startswith("_"):  # the rest is data
                returns = str(function.__annotations__.get("return", "None"))
                is_property = isinstance(member, property)
                members[name] = _Member(name, function.__qualname__, returns, is_property)
    return tuple(members.values())


class _Guarded:
    """An object of a plugin; methods are closures in ``__dict__``, made once."""

    _object: Any
    guard: PluginGuard

    def __getattr__(self, name: str) -> Any:
        if name == "_object":
            raise AttributeError(name)
        return getattr(self._object, name)

    def __repr__(self) -> str:
        return repr(self._object)


@cache
def _class_of(contracts: tuple[type, ...], name: str) -> type[_Guarded]:
    """Return the class of guarded objects with the properties of ``contracts``."""
    names = {m.name for contract in contracts for m in _members(contract) if m.is_property}
    return type(f"Guarded{name}", (_Guarded,), {name: _property(name) for name in names})


def _property(name: str) -> property:
    return property(lambda self: self.__dict__[name]())


def _has(built: Any, contract: type) -> bool:
    """Whether an object has an optional protocol. Its properties are not run."""
    return all(
        inspect.getattr_static(built, member.name, None) is not None
        or (not member.is_property and hasattr(built, member.name))
        for member in _members(contract)
    )


class _Boundary(NamedTuple):
    """Wraps the objects of one plugin."""

    guard: PluginGuard
    label: str

    def of(self, built: Any, annotation: str) -> Any:
        """Return ``built`` checked and wrapped as its annotation says; raises ``TypeError``."""
        if annotation.endswith(" | None"):
            if built is None:
                return None
            annotation = annotation.removesuffix(" | None")
        if _FUNCTION.fullmatch(annotation):
            if not callable(built):
                raise unexpected(built, f"a function for {self.label}")
            return _guarded_function(self.guard, built, self.label)
        contract = getattr(types, annotation, None)
        if not inspect.isclass(contract):
            return built
        if _is_protocol(contract):
            if getattr(type(built), "treadle_unguarded", False):
                return built
            return self._object(built, contract)
        if not isinstance(built, contract):
            raise unexpected(built, annotation)
        if is_dataclass(contract) and (members := _members(contract)):
            return replace(cast(Any, built), **{m.name: self._call(m, built) for m in members})
        return built

    def _object(self, built: Any, contract: type) -> _Guarded:
        optional = (c for c in self.guard.kind.optional if _has(built, c))
        contracts = (contract, *optional)
        guarded = _class_of(contracts, type(built).__name__)()
        guarded._object, guarded.guard = built, self.guard
        for each in contracts:
            for member in _members(each):
                guarded.__dict__[member.name] = self._call(member, built)
        return guarded

    def _call(self, member: _Member, built: Any) -> Call:
        """Return the guarded method, or the getter of the guarded property."""
        name = member.name
        rules = self.guard.kind.methods.get(member.key, _PLAIN)
        call = None if member.is_property else getattr(built, name, None)
        if call is None:
            call = _getter(built, name, member.is_property)
        return _guarded_call(self.guard, call, name, rules, self._check(member, rules))

    def _check(self, member: _Member, rules: MethodRules) -> Call | None:
        """Return what checks and wraps the results of a method, ``None`` if nothing does."""
        annotation = member.returns
        if rules.result is not None:
            return rules.result() if isinstance(rules.result, type) else rules.result
        if annotation.startswith("Iterator["):
            return lambda iterator, *_: self._iterate(iter(iterator), member.name, rules)
        if annotation in _CHECKS:
            return _CHECKS[annotation]
        plain = annotation.removesuffix(" | None")
        if inspect.isclass(getattr(types, plain, None)) or _FUNCTION.fullmatch(plain):
            return lambda built, *_: self.of(built, annotation)
        return None

    def _iterate(self, iterator: Iterator[Any], name: str, rules: MethodRules) -> Iterator[Any]:
        """Only what happens inside the plugin's iterator is the plugin's failure."""
        while True:
            try:
                item = next(iterator)
                checked = item if rules.item is None else rules.item(item)
            except StopIteration:
                return
            except NOT_CAUGHT:
                raise
            except BaseException as error:
                self.guard.fail(name, error, in_step=rules.in_step)
            yield checked


def _guarded_call(
    guard: PluginGuard, call: Call, name: str, rules: MethodRules, check: Call | None
) -> Call:
    """Return ``call`` with its result checked, its failures named and, unless the rules say
    otherwise, the calls counted. Nothing is looked up in a call: some are made for every layer."""
    if not rules.counted:

        def uncounted(*arguments: Any, **named: Any) -> Any:
            try:
                value = call(*arguments, **named)
                return value if check is None else check(value, *arguments)
            except NOT_CAUGHT:
                raise
            except BaseException as error:
                return guard.handle(name, rules, error, arguments)

        return uncounted

    done = guard.counter(name).done

    def counted(*arguments: Any, **named: Any) -> Any:
        if guard.is_open:
            return None
        began = perf_counter()
        try:
            value = call(*arguments, **named)
            if check is not None:
                value = check(value, *arguments)
        except NOT_CAUGHT:
            raise
        except rules.replies:
            done(perf_counter() - began)
            raise
        except BaseException as error:
            return guard.handle(name, rules, error, arguments, began)
        if guard.strikes:
            guard.strikes = 0
        done(perf_counter() - began)
        return value

    return counted


def _guarded_function(guard: PluginGuard, function: Call, label: str) -> Call:
    """Return a kernel with its failures named. It is called several times in every layer, always
    with positional arguments, so that nothing else is done in a call."""

    def guarded(*arguments: Any) -> Any:
        try:
            value = function(*arguments)
        except NOT_CAUGHT:
            raise
        except BaseException as error:
            guard.fail(label, error)
        if value is None:
            guard.fail(label, unexpected(value, "a result"))
        return value

    return guarded


def _getter(built: Any, name: str, is_property: bool) -> Call:
    """Return a function that reads a property, or that fails as a call of a missing method does."""
    if is_property:
        return lambda: getattr(built, name)
    return lambda *arguments, **named: getattr(built, name)(*arguments, **named)


# ------------------------------------------------------------------------ checks by annotation


def _instance_of(*kinds: type, words: str) -> Call:
    """Return a check that accepts instances of ``kinds``."""

    def check(result: Any, *_: Any) -> Any:
        if isinstance(result, kinds):
            return result
        raise unexpected(result, words)

    return check


def _ids(result: Any, *_: Any) -> list[int]:
    if isinstance(result, list) and set(map(type, result)) <= {int}:
        return result
    raise unexpected(result, "a list of ints")


def _flag(result: Any, *_: Any) -> Any:
    if callable(result):  # it would always be true
        raise TypeError("it is a method; it must be a property")
    return result


_CHECKS: dict[str, Call] = {
    "str": _instance_of(str, words="a str"),
    "str | None": _instance_of(str, type(None), words="a str or None"),
    "bytes": _instance_of(bytes, words="bytes"),
    "list[int]": _ids,
    "frozenset[int]": lambda result, *_: frozenset(result),
    "bool": _flag,
}
