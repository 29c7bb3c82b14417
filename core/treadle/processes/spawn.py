"""Starting a Python process of ours: a fresh interpreter that shares one socket with its parent.

Not ``multiprocessing``: that imports the user's main module again, speaks pickle and leaves helper
processes. The child sits in a process group of its own, so Control-C in a terminal does not reach
it, and sees its parent's end by the end of the socket.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys

__all__ = ("spawn",)

# The child imports from where the parent does, and nothing from its working directory.
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from {module} import {name}; {name}(int(sys.argv[1]))"
)


def spawn(entry: str, end: socket.socket) -> subprocess.Popen[bytes]:
    """Run ``entry`` (``module:function``) with the number of its copy of ``end``.

    The caller closes its own copy of ``end``.
    """
    module, _, name = entry.partition(":")
    command = [
        sys.executable,
        *(["-O"] if sys.flags.optimize else []),
        "-P",
        "-c",
        BOOT.format(module=module, name=name),
        str(end.fileno()),
        json.dumps(sys.path),
    ]
    return subprocess.Popen(
        command, pass_fds=[end.fileno()], stdin=subprocess.DEVNULL, process_group=0
    )
