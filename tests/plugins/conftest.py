"""What tests of kernels share: a process of their own."""

import os
import subprocess
import textwrap
from collections.abc import Callable

import pytest


@pytest.fixture
def in_process(preloaded: list[str], pytestconfig: pytest.Config) -> Callable[..., None]:
    """Runs the pieces of a program in a process of its own, in Triton's interpreter or not."""
    pytest.importorskip("triton")
    folder = str(pytestconfig.rootpath / "tests" / "conformance")

    def run(*pieces: str, interpret: bool) -> None:
        more = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": str(int(interpret))}
        begin = f"import sys; sys.path.insert(0, {folder!r})\n"
        if interpret:
            begin += "import interpreter\n"
        code = begin + "".join(textwrap.dedent(piece) for piece in pieces)
        command = [*preloaded, "-c", code]
        ran = subprocess.run(
            command, env=os.environ | more, capture_output=True, text=True, timeout=600
        )
        assert ran.returncode == 0, ran.stderr

    return run
