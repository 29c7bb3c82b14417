"""The executor ``ray``: tensor parallelism with workers that Ray places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from treadle.api import impl
from treadle.api.hookspecs import Options

if TYPE_CHECKING:
    from treadle.api.types import Executor
    from treadle.config import EngineConfig

__all__ = ("TREADLE_OPTIONS", "RayOptions", "treadle_executor")


class RayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``executors:ray``."""

    address: Annotated[
        str,
        Meta(description="local starts Ray here; auto joins the one of this node; or host:port."),
    ] = "local"
    placement: Annotated[
        Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"],
        Meta(description="How workers are laid over nodes."),
    ] = "PACK"
    placement_timeout: Annotated[
        int, Meta(ge=1, description="Seconds to wait until the cluster has room.")
    ] = 60
    cpus_per_worker: Annotated[
        float, Meta(ge=0, description="CPUs that each worker reserves, beside its GPU.")
    ] = 1.0


TREADLE_OPTIONS = {"executors:ray": RayOptions}


@impl
def treadle_executor(
    name: str, config: EngineConfig, plugins: Any, options: Options
) -> Executor | None:
    if name != "ray":
        return None
    from treadle_executor_ray.executor import RayExecutor

    return RayExecutor(config, plugins, RayOptions(**options))
