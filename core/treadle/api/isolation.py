"""Processes with limits, for plugins that run what nobody can trust: templates, converters.

``IsolatedProcess`` starts a function of the plugin, ``module:function``, in a process that is killed
when it takes too long. That function passes its requests to ``serve_requests``, below limits that it
sets itself. A request whose process ends raises ``ProcessExit``, which says whether others have killed it.
"""

from treadle.processes.isolated import (
    IsolatedProcess,
    ProcessExit,
    limit_cpu,
    limit_memory,
    serve_requests,
)

__all__ = ("IsolatedProcess", "ProcessExit", "limit_cpu", "limit_memory", "serve_requests")
