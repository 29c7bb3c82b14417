"""The boundary between the core and objects of plugins, made from their protocols.

``wrap`` returns an object with the methods and properties of the protocol. Each converts what the
plugin's own raises into an error naming plugin, method and cause, checks the result, counts and
times the call. What a protocol returns is wrapped too. Everything outside the protocol is the
plugin's own attribute. A class with ``treadle_unguarded = True`` is left as it is: the method of an
unquantized layer, which layers recognize by its class and give kernels.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from time import perf_counter
from typing import Any, NamedTuple, cast

from treadle.api import types
from treadle.api.plugin_kind import MethodRules, PluginKind, unexpected
from treadle.plugins.call_stats import NOT_CAUGHT
from treadle.plugins.guard import PluginGuard
from treadle.plugins.results import check_of

__all__ = ("wrap",)

Call = Callable[..., Any]

_PLAIN = MethodRules()
_FUNCTION = re.compile(r"Callable\[(?:\[.*\]|\.\.\.), (.+)\]")

log = logging.getLogger("treadle.plugins")


def wrap(built: Any, kind: PluginKind[Any], guard: PluginGuard, *, label: str = "") -> Any:
    """Return ``built``, which the hook of ``kind`` returned, behind the boundary.

    ``label`` names functions that the plugin returns, instead of the method that returned them.
    Raises the error of ``guard`` for something that is not what the kind builds.
    """
    if kind.builds is None:
        return built
    try:
        return _Boundary(kind, guard, label or kind.hook).of(built, kind.builds.__name__)
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


def _protocol_names(contract: type) -> set[str]:
    """Return the names of the methods, properties and data of a protocol."""
    bases = [base for base in contract.__mro__ if _is_protocol(base)]
    names = {name for base in bases for name in (*vars(base), *inspect.get_annotations(base))}
    return {name for name in names if not name.startswith("_")}


@cache
def _members(contract: type) -> tuple[_Member, ...]:
    if is_dataclass(contract):
        found = ((f.name, _FUNCTION.fullmatch(str(f.type))) for f in fields(contract))
        return tuple(
            _Member(name, f"{contract.__name__}.{name}", match[1], False)
            for name, match in found
            if match
        )
    members = []
    for name in sorted(_protocol_names(contract)):
        member = inspect.getattr_static(contract, name, None)
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function):  # the rest is data
            returns = str(function.__annotations__.get("return", "None"))
            key = function.__qualname__
            members.append(_Member(name, key, returns, isinstance(member, property)))
    return tuple(members)


class _Guarded:
    """An object of a plugin; methods are closures in ``__dict__``, made once."""

    _object: Any
    plugin: str

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

    kind: PluginKind[Any]
    guard: PluginGuard
    label: str

    def of(self, built: Any, annotation: str) -> Any:
        """Return ``built`` checked and wrapped as its annotation says; raises ``TypeError``."""
        if annotation.endswith(" | None"):
            if built is None:
                return None
            annotation = annotation.removesuffix(" | None")
        if _FUNCTION.fullmatch(annotation):
            return self._function(built)
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
            calls = {m.name: self._call(m, built, False) for m in members}
            return replace(cast(Any, built), **calls)
        return built

    def _object(self, built: Any, contract: type) -> _Guarded:
        optional = (c for c in self.kind.optional if _has(built, c))
        contracts = (contract, *optional)
        guarded = _class_of(contracts, type(built).__name__)()
        guarded._object, guarded.plugin = built, self.guard.entry.id
        for each in contracts:
            for member in _members(each):
                guarded.__dict__[member.name] = self._call(member, built, member.is_property)
        return guarded

    def _function(self, built: Any) -> Call:
        if not callable(built):
            raise unexpected(built, f"a function for {self.label}")

        guard, label = self.guard, self.label

        def function(*arguments: Any) -> Any:
            try:
                value = built(*arguments)
            except NOT_CAUGHT:
                raise
            except BaseException as error:
                guard.fail(label, error)
            if value is None:
                guard.fail_result(label, value, "a result")
            return value

        return function

    def _call(self, member: _Member, built: Any, is_property: bool) -> Call:
        """Return the guarded method, or the getter of the guarded property."""
        name = member.name
        rules = self.kind.methods.get(member.key, _PLAIN)
        if is_property:

            def call() -> Any:
                return getattr(built, name)
        else:
            call = getattr(built, name, None) or _absent(built, name)
        result = self._result(member, rules)
        if self.guard.breaker is not None:
            return self._breaking(call, name, result)
        make = self._counted if rules.counted else self._uncounted
        return make(call, name, result, rules)

    def _result(self, member: _Member, rules: MethodRules) -> Call | None:
        annotation = member.returns
        if rules.result is not None:
            return rules.result() if isinstance(rules.result, type) else rules.result
        if annotation.startswith("Iterator["):
            return lambda iterator, *_: self._iterate(iter(iterator), member.name, rules)
        if (check := check_of(annotation)) is not None:
            return check
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

    # ---------------------------------------------------------------------------- closures

    def _counted(self, call: Call, name: str, result: Call | None, rules: MethodRules) -> Call:
        guard, done = self.guard, self.guard.counter(name).done

        def method(*arguments: Any, **named: Any) -> Any:
            began = perf_counter()
            try:
                value = call(*arguments, **named)
                if result is not None:
                    value = result(value, *arguments)
            except NOT_CAUGHT:
                raise
            except rules.replies:
                done(perf_counter() - began)
                raise
            except BaseException as error:
                return _failed(guard, name, rules, error, arguments, began)
            done(perf_counter() - began)
            return value

        return method

    def _uncounted(self, call: Call, name: str, result: Call | None, rules: MethodRules) -> Call:
        """Return a method that costs as little as possible."""
        guard = self.guard
        if result is None:

            def method(*arguments: Any, **named: Any) -> Any:
                try:
                    return call(*arguments, **named)
                except NOT_CAUGHT:
                    raise
                except BaseException as error:
                    return _failed(guard, name, rules, error, arguments, None)

            return method

        def checked(*arguments: Any, **named: Any) -> Any:
            try:
                return result(call(*arguments, **named), *arguments)
            except NOT_CAUGHT:
                raise
            except BaseException as error:
                return _failed(guard, name, rules, error, arguments, None)

        return checked

    def _breaking(self, call: Call, name: str, result: Call | None) -> Call:
        """Return ``None`` instead of a failure, and call no more after repeated ones."""
        breaker, done = self.guard.breaker, self.guard.counter(name).done
        if breaker is None:
            raise ValueError("a guard without a circuit breaker")

        def method(*arguments: Any, **named: Any) -> Any:
            if breaker.is_open:
                return None
            began = perf_counter()
            try:
                value = call(*arguments, **named)
                if result is not None:
                    value = result(value, *arguments)
            except NOT_CAUGHT:
                raise
            except BaseException as error:
                breaker.failed(name, error, began)
                return None
            breaker.succeeded()
            done(perf_counter() - began)
            return value

        return method


def _absent(built: Any, name: str) -> Call:
    """Return a method that fails like a call of the one that is missing."""
    return lambda *arguments, **named: getattr(built, name)(*arguments, **named)


def _failed(
    guard: PluginGuard,
    name: str,
    rules: MethodRules,
    error: BaseException,
    arguments: tuple[Any, ...],
    began: float | None,
) -> Any:
    """Raise the error of a failed call, or return what the rules say instead."""
    try:
        guard.fail(name, error, in_step=rules.in_step, began=began, error_class=rules.error)
    except Exception as named:
        if rules.fallback is None or guard.is_fatal:
            raise
        log.warning("%s; a replacement is used", named)
        return rules.fallback(named, *arguments)
