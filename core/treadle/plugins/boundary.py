"""The boundary between the core and objects of plugins, made from their protocols.

``wrap`` returns an object with the methods of the protocol. Each converts what the plugin's own raises
into an error naming plugin, method and cause, checks the result, counts and times the call. What a
protocol returns is wrapped too; what is outside of it is the plugin's own.
A class with ``treadle_unguarded = True``, which layers recognize and give kernels, is left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from functools import cache, cached_property, partial
from operator import attrgetter, methodcaller
from time import perf_counter
from typing import Any, NamedTuple, cast

from treadle.api import types
from treadle.api.contracts import FUNCTION, Member, attributes, implements, is_protocol, members
from treadle.api.plugin_kind import MethodRules
from treadle.api.result_checks import BY_ANNOTATION, unexpected
from treadle.errors import PluginLoadError
from treadle.plugins.guard import PluginGuard

__all__ = ("unwrap", "wrap")

Call = Callable[..., Any]

DEFAULT_RULES = MethodRules()


def wrap(instance: Any, guard: PluginGuard, *, contract: str = "", label: str = "") -> Any:
    """Return ``instance``, an object of the plugin of ``guard``, behind the boundary.

    ``contract`` names its protocol or data class, if that is not what the kind builds; ``label``
    names functions that the plugin returns, instead of the method that returned them. Raises the
    error of ``guard`` for something else than the contract.
    """
    kind = guard.kind
    if kind.builds is None:
        return instance
    try:
        return _Boundary(guard, label or kind.hook).wrap(instance, contract or kind.builds.__name__)
    except TypeError as error:
        guard.fail(kind.hook, error, error_class=PluginLoadError)


def unwrap(instance: Any) -> Any:
    """Return what the plugin has built, for another call of the same plugin."""
    return instance._object if isinstance(instance, _Guarded) else instance


class _Guarded:
    """An object of a plugin; methods are closures in ``__dict__``, made as they are first used."""

    _object: Any
    _boundary: _Boundary
    guard: PluginGuard

    def __getattr__(self, name: str) -> Any:
        if name == "_object":
            raise AttributeError(name)
        return getattr(self._object, name)

    def __repr__(self) -> str:
        return repr(self._object)


@cache
def _class_of(contracts: tuple[type, ...], name: str) -> type[_Guarded]:
    """Return the class of guarded objects with the members and the data of ``contracts``.

    From Python 3.12 on, ``isinstance`` with a protocol sees no attribute of ``__getattr__``.
    """
    names: dict[str, Any] = {}
    for contract in contracts:
        names |= {n: property(attrgetter(f"_object.{n}")) for n in attributes(contract)}
        for member in members(contract):

            def build(guarded: _Guarded, member: Member = member) -> Call:
                return guarded._boundary.call(member, guarded._object)

            names[member.name] = call = cached_property(build)
            if member.is_property:
                getter = f"_get_{member.name}"
                names |= {getter: call, member.name: property(methodcaller(getter))}
    return type(f"Guarded{name}", (_Guarded,), names)


class _Boundary(NamedTuple):
    """Wraps the objects of one plugin."""

    guard: PluginGuard
    label: str

    def wrap(self, value: Any, annotation: str) -> Any:
        """Return ``value`` checked and wrapped as its annotation says; raises ``TypeError``."""
        if annotation.endswith(" | None"):
            if value is None:
                return None
            annotation = annotation.removesuffix(" | None")
        if FUNCTION.fullmatch(annotation):
            if not callable(value):
                raise unexpected(value, f"a function for {self.label}")
            return _guarded_function(self.guard, value, self.label)
        contract = getattr(types, annotation, None)
        if not inspect.isclass(contract):
            return value
        if is_protocol(contract):
            if getattr(type(value), "treadle_unguarded", False):
                return value
            return self._object(value, contract)
        if not isinstance(value, contract):
            raise unexpected(value, annotation)
        if is_dataclass(contract) and (named := members(contract)):
            return replace(cast(Any, value), **{m.name: self.call(m, value) for m in named})
        return value

    def _object(self, instance: Any, contract: type) -> _Guarded:
        methods = [m.name for m in members(contract) if not m.is_property]
        if methods and not any(callable(getattr(instance, name, None)) for name in methods):
            raise unexpected(instance, f"{contract.__name__}, with {', '.join(methods)},")
        optional = (c for c in self.guard.kind.optional if implements(instance, c))
        guarded = _class_of((contract, *optional), type(instance).__name__)()
        guarded._object, guarded._boundary, guarded.guard = instance, self, self.guard
        return guarded

    def call(self, member: Member, instance: Any) -> Call:
        """Return the guarded method, or the getter of the guarded property."""
        name = member.name
        rules = self.guard.kind.methods.get(member.key, DEFAULT_RULES)
        call: Call = partial(getattr, instance, name)
        if not member.is_property:  # one that is missing fails when it is called
            call = getattr(instance, name, None) or (
                lambda *a, **k: getattr(instance, name)(*a, **k)
            )
        return _guarded_call(self.guard, call, name, rules, self._check(member, rules))

    def _check(self, member: Member, rules: MethodRules) -> Call | None:
        """Return what checks and wraps the results of a method, ``None`` if nothing does."""
        annotation = member.returns
        if rules.result is not None:
            return rules.result() if isinstance(rules.result, type) else rules.result
        if annotation.startswith("Iterator["):
            return lambda iterator, *_: self._iterate(iter(iterator), member.name, rules)
        if annotation in BY_ANNOTATION:
            return BY_ANNOTATION[annotation]
        type_name = annotation.removesuffix(" | None")
        if inspect.isclass(getattr(types, type_name, None)) or FUNCTION.fullmatch(type_name):
            return lambda built, *_: self.wrap(built, annotation)
        return None

    def _iterate(self, iterator: Iterator[Any], name: str, rules: MethodRules) -> Iterator[Any]:
        """Only what happens inside the plugin's iterator is the plugin's failure."""
        while True:
            try:
                item = next(iterator)
                checked = item if rules.item is None else rules.item(item)
            except StopIteration:
                return
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
            except BaseException as error:
                return guard.handle(name, rules, error, arguments)

        return uncounted

    count_call = guard.counter(name).record_success

    def counted(*arguments: Any, **named: Any) -> Any:
        start_time = perf_counter()
        if start_time < guard.retry_time:
            return None
        try:
            value = call(*arguments, **named)
            if check is not None:
                value = check(value, *arguments)
        except rules.replies:
            count_call(perf_counter() - start_time)
            raise
        except BaseException as error:
            return guard.handle(name, rules, error, arguments, start_time)
        if guard.strikes:
            guard.recover()
        count_call(perf_counter() - start_time)
        return value

    return counted


def _guarded_function(guard: PluginGuard, function: Call, label: str) -> Call:
    """Return a kernel with its failures named. It is called several times in every layer, always
    with positional arguments, so that nothing else is done in a call."""

    def guarded(*arguments: Any) -> Any:
        try:
            value = function(*arguments)
        except BaseException as error:
            guard.fail(label, error)
        if value is None:
            guard.fail(label, unexpected(value, "a result"))
        return value

    return guarded
