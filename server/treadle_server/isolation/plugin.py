"""What the plugin manager loads in place of a plugin that runs in a process of its own.

Its hooks pass their arguments on and return proxies: objects with the methods and properties of the
protocol that the kind builds. Around them stands the boundary of the plugin manager, as around the
plugin's own objects, and counts and names what goes wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.api import impl
from treadle.api import types as t
from treadle.api.kinds import REASONING_PARSERS, RENDERERS, STRUCTURED_OUTPUT, TOOL_PARSERS
from treadle.api.plugin_kind import PluginKind
from treadle.errors import PluginLoadError
from treadle.plugins import Entry
from treadle_server.hookspecs import SERVER
from treadle_server.isolation.process import GRAMMAR_MEMORY, MEMORY, PluginProcess
from treadle_server.isolation.proxies import OPEN_SECONDS, Origin
from treadle_server.isolation.route_plugin import ServerProxy
from treadle_server.isolation.wire import Call, Hello

if TYPE_CHECKING:
    from litestar.config.app import AppConfig

    from treadle_server.isolation.routes import IsolatedRoutes

__all__ = ("SECONDS", "IsolatedPlugin")

START_SECONDS = 120.0
VOCABULARY_SECONDS = 60.0
"""The longest time in which a grammar backend may read a vocabulary."""
SECONDS: Mapping[str, float] = {
    TOOL_PARSERS.name: 1.0,
    REASONING_PARSERS.name: 1.0,
    RENDERERS.name: 10.0,
    STRUCTURED_OUTPUT.name: 5.0,
}
"""Kinds whose plugins can be isolated, and the longest time of a call. It is less than the time
after which a thread is given up, so that none is."""


class IsolatedPlugin:
    """The hooks of one plugin, called in its process. Raises ``PluginLoadError`` for a plugin that
    cannot be imported there, and for a kind that cannot be isolated.

    Grammars of a plugin that has other kinds too have a process of their own, as steps wait for them.
    """

    def __init__(self, entry: Entry) -> None:
        if entry.kind not in (*SECONDS, SERVER.name):
            raise PluginLoadError(
                f"--isolate names {entry.id}; plugins that can be isolated are {', '.join(SECONDS)}, "
                f"{SERVER.name}"
            )
        if entry.adapted:
            raise PluginLoadError(
                f"--isolate names {entry.id}, which {entry.reason}; adapters do not reach into a process"
            )
        self._entry = entry
        self._lock = threading.Lock()
        self.processes: dict[bool, PluginProcess] = {}
        self._routes: ServerProxy | None = None
        if entry.kind == SERVER.name:
            self._routes = ServerProxy(entry)
        else:
            self.process = self._process_of(entry.kind, entry.key)
            self.process.call(Call(0, ""), START_SECONDS)

    @property
    def parts(self) -> Sequence[PluginProcess | IsolatedRoutes]:
        """What may have been lost too often."""
        routes = () if self._routes is None else self._routes.parts
        return (*self.processes.values(), *routes)

    @impl
    def treadle_server(self, app: AppConfig, options: Any) -> None:
        if self._routes is None:  # its parser was loaded before
            entries: list[Entry] = app.state.context.engine.plugins.entries
            name = self._entry.plugin
            own = [e for e in entries if e.plugin == name and e.kind == SERVER.name]
            self._routes = ServerProxy(own[0])
        self._routes.add_to(app, options)

    @impl
    def treadle_match(self, kind: str, key: str, model: t.ModelTraits, options: Any) -> Any:
        call = Call(0, "treadle_match", [kind, key, dict(options)], {"model": model})
        return self._process_of(kind, key).call(call, OPEN_SECONDS)[0]

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

    @impl
    def treadle_grammar_compiler(
        self, name: str, tokenizer: t.Tokenizer, vocab_size: int, options: Any
    ) -> Any:
        named = {"tokenizer": tokenizer, "vocab_size": vocab_size}
        compiler = self._open(STRUCTURED_OUTPUT, name, options, **named)
        compiler.vocab_size = vocab_size
        return compiler

    def _open(self, kind: PluginKind[Any], key: str, options: Any, **named: Any) -> Any:
        process, tokenizer = self._process_of(kind.name, key), named["tokenizer"]
        arguments = [kind.name, key, dict(options)]
        is_grammar = kind is STRUCTURED_OUTPUT
        limit = VOCABULARY_SECONDS if is_grammar else OPEN_SECONDS
        make = process.call_beside if is_grammar else process.call

        def build() -> tuple[Any, int]:
            return make(Call(0, kind.hook, arguments, dict(named)), limit, tokenizer)

        contract: Any = kind.builds
        return Origin(process, contract, build, SECONDS[kind.name], tokenizer).proxy(kind.optional)

    def _process_of(self, kind: str, key: str) -> PluginProcess:
        is_grammar, entry = kind == STRUCTURED_OUTPUT.name, self._entry
        with self._lock:
            if is_grammar not in self.processes:
                source = (kind, key, entry.target, entry.dist, entry.version, entry.file)
                hello = Hello(*source, memory=GRAMMAR_MEMORY if is_grammar else MEMORY)
                self.processes[is_grammar] = PluginProcess(entry.id, hello)
            return self.processes[is_grammar]
