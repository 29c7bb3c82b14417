"""Every error that treadle raises on purpose.

::

    TreadleError
    ├── ConfigError             an option has an invalid value
    ├── RequestError            a request is invalid; others are not affected   (HTTP 400)
    │   ├── ContextLengthError  prompt and requested output are too long
    │   └── ModelNotFoundError  the request names a model that is not served    (HTTP 404)
    ├── QueueFullError          too many requests are waiting; try again later  (HTTP 429)
    ├── CheckpointError         a checkpoint is missing, damaged or unsupported
    │   └── UnsupportedModelError
    ├── EngineError             the engine cannot continue
    │   ├── EngineDeadError     it has stopped; start a new one                 (HTTP 503)
    │   └── OutOfMemoryError    the device has too little memory
    └── PluginError             a plugin is missing, ambiguous or broken
        ├── PluginNotFoundError
        ├── PluginConflictError
        ├── PluginLoadError
        └── PluginReloadError   it cannot be replaced while the server runs     (HTTP 409)

A message states what failed, the value, what is allowed, and what to do.
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
    """Base class of all errors that treadle raises on purpose."""


class ConfigError(TreadleError, ValueError):
    """An option has an invalid value."""


class RequestError(TreadleError, ValueError):
    """A request is invalid.

    ``param`` is the API name of the invalid parameter (``temperature``, ``messages[0].role``).
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt, or prompt plus requested output, is too long for the model or the KV cache."""


class ModelNotFoundError(RequestError):
    """The request names a model that this engine does not serve."""


class QueueFullError(TreadleError):
    """Too many requests are waiting."""


class CheckpointError(TreadleError):
    """A checkpoint is missing, damaged, or differs from its configuration."""


class UnsupportedModelError(CheckpointError):
    """No installed plugin can run this architecture or checkpoint."""


class EngineError(TreadleError, RuntimeError):
    """The engine cannot continue."""


class EngineDeadError(EngineError):
    """The engine has stopped and accepts no more requests."""


class OutOfMemoryError(EngineError):
    """The device has too little memory; the message says how to use less."""


class PluginError(TreadleError):
    """A plugin is missing, ambiguous or broken.

    ``plugin`` is the id (``kind:key``) of the plugin that failed in a call.
    """

    plugin: str | None = None


class PluginNotFoundError(PluginError, LookupError):
    """No plugin provides the key."""


class PluginConflictError(PluginError):
    """Several plugins provide the key, and none of them is pinned."""


class PluginLoadError(PluginError):
    """A plugin failed while it was imported, registered or called."""


class PluginReloadError(PluginError):
    """A plugin cannot be replaced by another version while the server runs."""
