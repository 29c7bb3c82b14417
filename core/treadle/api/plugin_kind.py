"""The declaration of a plugin kind.

Everything that depends on a kind follows from its declaration: the call of its hook, the boundary
around what the hook builds, the documentation, ``treadle plugin new`` and ``treadle plugin test``.
The core declares its kinds in ``treadle.api.kinds``; another distribution declares its own in the
entry-point group ``treadle.kinds``.

The entry-point group of a kind is ``treadle.KIND`` or ``treadle.KIND.vN``, where N is the generation
of its hook. A new argument keeps the generation; a renamed hook or another result is a new one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar

from treadle.api.hookspecs import PROJECT, FirstResultHooks
from treadle.errors import PluginLoadError, TreadleError

__all__ = (
    "DECLARATIONS",
    "FALLBACK",
    "OVERRIDES",
    "Failure",
    "MethodRules",
    "Mode",
    "PluginKind",
    "parse_group",
)

T = TypeVar("T")

_GROUP = re.compile(rf"{PROJECT}\.([a-z_]+)(?:\.v([1-9][0-9]*))?")

Mode = Literal["one", "many", "best", "always"]
Failure = Literal["engine", "request", "itself"]

FALLBACK = "*"
"""The key that serves every key of its kind that no other plugin declares."""

OVERRIDES = "overrides"
"""The group whose entries are named ``kind.key`` and replace the plain owner of that key."""

DECLARATIONS = f"{PROJECT}.kinds"
"""The group of declarations of kinds, which are no plugins."""

HOOK_SECONDS = 10.0
"""The smallest time budget of a hook, which may read files and import."""

LOADING_SECONDS = 600.0
"""The smallest time budget of a method that downloads or loads a model."""


@dataclass(frozen=True, slots=True)
class MethodRules:
    """How the boundary treats one method, where the annotations of its protocol do not say it all.

    ``result(result, *arguments)`` returns the result to use, or raises ``TypeError`` or
    ``ValueError``; a class is instantiated for each object. ``item`` does the same for each item of
    an iterator. ``fallback(error, *arguments)`` returns what to use if the call fails.
    """

    result: Callable[..., Any] | None = None
    item: Callable[[Any], Any] | None = None
    fallback: Callable[..., Any] | None = None
    in_step: bool = False
    """Called while the engine computes: a ``TreadleError`` is a failure like any other exception,
    because no user waits for its words."""
    counted: bool = True
    """``False`` for methods that are called too often to count and time each call; failures are
    counted nevertheless."""
    replies: tuple[type[Exception], ...] = ()
    """Exceptions that are an answer and not a failure."""
    error: type[TreadleError] | None = None
    """What a failure raises, if not the error of the kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginKind(Generic[T]):
    """The declaration of one kind of plugin; ``T`` is what its hook builds."""

    name: str
    key: str = "name"
    """What a key is, in words."""
    hook: str
    builds: type[T] | None
    """The protocol or data class that the hook returns; ``None`` if it returns nothing."""
    specs: type = FirstResultHooks
    """The class that holds the hook specification."""
    mode: Mode = "one"
    """``one``: the plugin of the requested key is called. ``many``: those of a list of keys.
    ``best``: all are called, and the best offer is used. ``always``: all are called."""
    key_argument: str = "name"
    """The argument of the hook that carries the key."""
    optional: tuple[type, ...] = ()
    """Optional protocols of what the hook builds, looked for with ``isinstance``."""
    methods: Mapping[str, MethodRules] = field(default_factory=lambda: MappingProxyType({}))
    """Rules by ``Protocol.method``."""
    failure: Failure = "engine"
    """What a failure costs: the start or the step, the request that needed the call, or only the
    plugin itself, which a circuit breaker disables after repeated failures."""
    error: type[TreadleError] = PluginLoadError
    """What a failure of a method raises."""
    budget: float = 10.0
    """Seconds that one call of a method may take before it counts as slow; see ``budget_of``."""
    loads: str = ""
    """The method that downloads or loads a model of any size."""
    option: str = ""
    """The command-line option that names the plugin to use, for messages."""
    matches: bool = False
    """Whether ``treadle_match`` chooses or orders the plugins when the option names none."""
    suite: str = ""
    """``module:class`` of the conformance suite."""
    suite_needs_subclass: bool = False
    """The suite must be told what to try, so that ``treadle plugin test`` cannot run it."""
    generation: int = 1
    adapter: Callable[[Any], object] | None = None
    """Returns, for a plugin of the generation before, an object with the hook of this one."""
    adapter_until: str = ""
    """The version of ``owner`` that will not have the adapter any more."""
    owner: str = "treadle-core"
    """The distribution that declares the kind and calls its hook."""

    @property
    def group(self) -> str:
        """The entry-point group."""
        return f"{PROJECT}.{self.name}"

    @property
    def spoken(self) -> tuple[int, ...]:
        """The generations of plugins that can be called, the newest first."""
        return (self.generation, self.generation - 1)[: 1 if self.adapter is None else 2]

    def adapt(self, plugin: object, options: object) -> object:
        """Return a plugin of the generation before, with its options, as one of this generation.

        Raises ``PluginLoadError``: the adapter has failed.
        """
        try:
            adapted: Any = self.adapter and self.adapter(plugin)
            adapted.TREADLE_OPTIONS = options
        except (Exception, SystemExit) as error:
            name = f"the adapter of {self.owner} from {self.name} v{self.generation - 1}"
            raise PluginLoadError(f"{name} failed: {type(error).__name__}: {error}") from error
        return adapted

    @property
    def has_fallback(self) -> bool:
        """Whether a plugin may serve all keys that no other plugin declares."""
        return self.mode in ("one", "many")

    def budget_of(self, method: str, seconds: float | None = None) -> float:
        """Return the seconds of one hook or method; ``seconds`` replaces ``budget``."""
        budget = self.budget if seconds is None else seconds
        if method == self.loads:
            return max(budget, LOADING_SECONDS)
        return max(budget, HOOK_SECONDS) if method.startswith(f"{PROJECT}_") else budget


def parse_group(group: str) -> tuple[str, int] | None:
    """Return ``("models", 2)`` for ``treadle.models.v2``, ``None`` for a group without plugins."""
    if group == DECLARATIONS or not group.startswith(f"{PROJECT}."):
        return None
    if match := _GROUP.fullmatch(group):
        return match[1], int(match[2] or 1)
    return group.removeprefix(f"{PROJECT}."), 0
