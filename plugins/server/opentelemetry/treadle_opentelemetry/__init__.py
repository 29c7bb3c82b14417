"""The server plugin ``opentelemetry``: a trace of each request, sent to a collector over OTLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from treadle.api import impl
from treadle.api.hookspecs import Options

if TYPE_CHECKING:
    from litestar.config.app import AppConfig

__all__ = ("TREADLE_OPTIONS", "TraceOptions", "treadle_server")


class TraceOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``server:opentelemetry``."""

    endpoint: Annotated[
        Annotated[str, Meta(pattern="^(env|https?://.+)$")] | None,
        Meta(
            description="URL of the collector's route for traces over OTLP/HTTP; env takes it from the "
            "variables OTEL_EXPORTER_OTLP_*. Nothing is traced without it.",
        ),
    ] = None
    sample_ratio: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(
            description="Share of the requests that are traced, but for those whose client has "
            "decided it; OTEL_TRACES_SAMPLER if it is left out.",
        ),
    ] = None


TREADLE_OPTIONS = {"server:opentelemetry": TraceOptions}


@impl
def treadle_server(app: AppConfig, options: Options) -> None:
    if options["endpoint"] is None:
        return
    from treadle_opentelemetry.tracing import Tracing

    tracing = Tracing(app.state.context, TraceOptions(**options))
    app.middleware.append(tracing.middleware)
    app.lifespan.append(tracing.lifespan)
