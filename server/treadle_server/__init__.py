"""The OpenAI-compatible server of treadle. Importing it imports neither litestar nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle_server.config import ServerConfig, server_from_options

if TYPE_CHECKING:
    from treadle_server.metric_names import MetricName
    from treadle_server.run import serve

__all__ = ("MetricName", "ServerConfig", "serve", "server_from_options")


def __getattr__(name: str) -> Any:
    match name:
        case "serve":
            from treadle_server.run import serve

            return serve
        case "MetricName":
            from treadle_server.metric_names import MetricName

            return MetricName
    raise AttributeError(f"module 'treadle_server' has no attribute {name!r}")
