"""What the plugin manager loads in place of a plugin that runs in a process of its own.

Its hooks pass their arguments on and return proxies: objects with the methods and properties of the
protocol that the kind builds. Around them stands the boundary of the plugin manager, as around the
plugin's own objects, and counts and names what goes wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from treadle.api import impl
from treadle.api import types as t
from treadle.api.contracts import members
from treadle.api.kinds import REASONING_PARSERS, RENDERERS, TOOL_PARSERS
from treadle.api.plugin_kind import PluginKind
from treadle.errors import PluginLoadError
from treadle.plugins import Entry, PluginManager
from treadle_server.isolation.process import MEMORY, ObjectLost, PluginProcess
from treadle_server.isolation.wire import Call, Hello, ObjectHandle

__all__ = ("SECONDS", "IsolatedPlugin", "refused")

START_SECONDS = 120.0
OPEN_SECONDS = 10.0
SECONDS: Mapping[str, float] = {
    TOOL_PARSERS.name: 1.0,
    REASONING_PARSERS.name: 1.0,
    RENDERERS.name: 10.0,
}
"""Kinds whose plugins can be isolated, and the longest time of a call. It is less than the time
after which a thread is given up, so that none is."""


class IsolatedPlugin:
    """The hooks of one plugin, called in its process. Raises ``PluginLoadError`` for a plugin that
    cannot be imported there, and for a kind that cannot be isolated."""

    def __init__(self, entry: Entry) -> None:
        if entry.kind not in SECONDS:
            raise PluginLoadError(
                f"--isolate names {entry.id}; plugins that can be isolated are {', '.join(SECONDS)}"
            )
        source = (entry.kind, entry.key, entry.target, entry.dist, entry.version, entry.file)
        self.process = PluginProcess(entry.id, Hello(*source, memory=MEMORY))
        self.process.call(Call(0, ""), START_SECONDS)

    @impl
    def treadle_match(self, kind: str, key: str, model: t.ModelTraits, options: Any) -> Any:
        call = Call(0, "treadle_match", [kind, key, dict(options)], {"model": model})
        return self.process.call(call, OPEN_SECONDS)[0]

    @impl
    def treadle_tool_parser(
        self, name: str, tokenizer: t.Tokenizer, tools: Sequence[t.Tool], options: Any
    ) -> Any:
        return self._open(TOOL_PARSERS, name, options, tokenizer=tokenizer, tools=tools)

    @impl
    def treadle_reasoning_parser(
        self, name: str, tokenizer: t.Tokenizer, prompt: str, options: Any
    ) -> Any:
        return self._open(REASONING_PARSERS, name, options, tokenizer=tokenizer, prompt=prompt)

    @impl
    def treadle_renderer(
        self, mode: str, files: t.ModelFiles, tokenizer: t.Tokenizer, options: Any
    ) -> Any:
        return self._open(RENDERERS, mode, options, files=files, tokenizer=tokenizer)

    def _open(self, kind: PluginKind[Any], key: str, options: Any, **named: Any) -> Any:
        origin = _Origin(self.process, kind, key, dict(options), named)
        opened, generation = origin.open()
        optional = tuple(c for c in kind.optional if c.__name__ in opened.optional)
        contract: Any = kind.builds
        return _class_of(contract, optional)(origin, opened.target, generation)


def refused(plugins: PluginManager) -> dict[str, str]:
    """Return the isolated plugins that are not called at the moment, with the reason."""
    loaded = plugins.loader.plugins
    found = {e.id: loaded.get(e.plugin) for e in plugins.entries}
    return {
        id: plugin.process.refusal
        for id, plugin in found.items()
        if isinstance(plugin, IsolatedPlugin) and plugin.process.refusal
    }


class _Origin:
    """How an object was built, to build it again in a new process."""

    def __init__(
        self,
        process: PluginProcess,
        kind: PluginKind[Any],
        key: str,
        options: dict[str, Any],
        named: dict[str, Any],
    ) -> None:
        self.process, self.kind = process, kind
        self.tokenizer = named["tokenizer"]
        self.seconds = SECONDS[kind.name]
        self._arguments, self._named = [kind.name, key, options], named

    def open(self) -> tuple[ObjectHandle, int]:
        call = Call(0, self.kind.hook, list(self._arguments), dict(self._named))
        value, generation = self.process.call(call, OPEN_SECONDS, self.tokenizer)
        return msgspec.convert(value, ObjectHandle), generation


class _Remote:
    """An object of the plugin. A subclass has the methods and properties of its protocols."""

    inline = False
    """A call waits for another process, which must not be done on an event loop."""

    def __init__(self, origin: _Origin, target: int, generation: int) -> None:
        self._origin = origin
        self._bind(target, generation)

    def _bind(self, target: int, generation: int) -> None:
        self._place = target, generation  # together: other threads call it meanwhile
        weakref.finalize(self, self._origin.process.free, target, generation).atexit = False

    def _call(self, method: str, arguments: Any, named: Any, *, read: bool = False) -> Any:
        origin = self._origin

        def call() -> Any:
            target, generation = self._place
            message = Call(target, method, list(arguments), dict(named), read)
            return origin.process.call(message, origin.seconds, origin.tokenizer, generation)[0]

        try:
            return call()
        except ObjectLost:
            # A parser has read a part of an answer, which is lost; a renderer remembers nothing.
            if origin.kind is not RENDERERS:
                raise
            opened, generation = origin.open()
            self._bind(opened.target, generation)
            return call()


@lru_cache(maxsize=64)
def _class_of(contract: Any, optional: tuple[type, ...]) -> type[_Remote]:
    """Return the class of proxies for objects of ``contract`` and of some optional protocols."""
    body = {
        m.name: _member(m.name, m.is_property) for c in (contract, *optional) for m in members(c)
    }
    return type(f"Isolated{contract.__name__}", (_Remote,), body)


def _member(name: str, is_property: bool) -> Any:
    if is_property:
        return property(lambda self: self._call(name, (), {}, read=True))
    return lambda self, *arguments, **named: self._call(name, arguments, named)
