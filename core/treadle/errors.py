"""Every error that treadle raises on purpose.

::

    TreadleError
    ├── ConfigError             an option has a value that cannot work
    ├── RequestError            one request is wrong; nobody else is affected   (HTTP 400)
    │   ├── ContextLengthError  the prompt or the wanted output does not fit
    │   └── ModelNotFoundError  the request names a model that is not served    (HTTP 404)
    ├── QueueFullError          the engine has no room now; try again later     (HTTP 429)
    ├── CheckpointError         a checkpoint is missing, damaged or unsupported
    │   └── UnsupportedModelError
    ├── EngineError             the engine cannot go on
    │   ├── EngineDeadError     it has stopped; a new one must be started       (HTTP 503)
    │   └── OutOfMemoryError    the device has no room for what was asked
    └── PluginError             a plugin is missing, ambiguous or broken
        ├── PluginNotFoundError
        ├── PluginConflictError
        ├── PluginLoadError
        └── PluginReloadError   it cannot be exchanged while the server runs    (HTTP 409)

A message says what happened, the value, what is allowed, and what to do.
"""

from __future__ import annotations

__all__ = (
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "EngineDeadError",
    "EngineError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "PluginConflictError",
    "PluginError",
    "PluginLoadError",
    "PluginNotFoundError",
    "PluginReloadError",
    "QueueFullError",
    "RequestError",
    "TreadleError",
    "UnsupportedModelError",
)


class TreadleError(Exception):
    """Base class of everything that treadle raises on purpose."""


class ConfigError(TreadleError, ValueError):
    """An option has a value that cannot work."""


class RequestError(TreadleError, ValueError):
    """One request is wrong.

    ``param`` names the parameter at fault in the words of the API (``temperature``,
    ``messages[0].role``), so that a frontend can point at it.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt, or the prompt and the wanted output, do not fit the model or its cache."""


class ModelNotFoundError(RequestError):
    """The request names a model that this engine does not serve."""


class QueueFullError(TreadleError):
    """The engine has no room for another request now."""


class CheckpointError(TreadleError):
    """A checkpoint is missing, damaged, or not what its configuration says."""


class UnsupportedModelError(CheckpointError):
    """No installed plugin can run this architecture or checkpoint."""


class EngineError(TreadleError, RuntimeError):
    """The engine cannot go on with what it was doing."""


class EngineDeadError(EngineError):
    """The engine has stopped; requests to it cannot be answered any more."""


class OutOfMemoryError(EngineError):
    """The device has no room for what was asked; the message says what would free some."""


class PluginError(TreadleError):
    """A plugin is missing, ambiguous or broken.

    ``plugin`` is the id, ``kind:key``, of the one whose code failed in a call.
    """

    plugin: str | None = None


class PluginNotFoundError(PluginError, LookupError):
    """No plugin provides a key."""


class PluginConflictError(PluginError):
    """Several plugins provide one key and nothing says which of them to take."""


class PluginLoadError(PluginError):
    """A plugin was found, but it failed while it was imported, registered or called."""


class PluginReloadError(PluginError):
    """A plugin cannot be exchanged for another version of it while the server runs."""
