"""Advisories that are held by what the source does not contain."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from repository import members, plugins, shipped

# Functions that remember what they were called with, without a bound. What they are called with comes
# from the installation (kinds, protocols, devices, shapes of kernels), never from a request.
UNBOUNDED_CACHES = {
    "treadle/api/contracts.py",
    "treadle/option_names.py",
    "treadle/plugins/boundary.py",
    "treadle/plugins/kinds.py",
    "treadle/testing/structured_output.py",
    "treadle_kernels_triton/hopper/packed_product.py",
    "treadle_kernels_triton/int4/linear.py",
    "treadle_kernels_triton/lookup.py",
    "treadle_triton_kit/tma.py",
}
# Caches that are pickles on disk, stores with names from requests, parts of frameworks that are not used,
# and formats of data that may hold objects.
NOT_IMPORTED = (
    *("diskcache", "litestar.stores.file", "litestar.middleware.csrf", "litestar.template"),
    *("cloudpickle", "dill", "zmq", "pandas", "pyarrow", "webdataset", "starlette", "fastapi"),
)


# A call without arguments of ``recv`` is that of ``multiprocessing.Connection``, which unpickles; that
# of a socket has a size.
UNSAFE = re.compile(
    r"allow_pickle|read_pickle|\bjoblib\b|jit\.load|os\.system|os\.popen|getoutput|shell=|\.recv\(\)"
    r"|recv_pyobj|send_pyobj|torch\.package|import_module\(config|yaml\.load\("
)


def matches(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """Return the files of all members that hold the pattern, each with the first line."""
    return [
        (path.relative_to(member.package.parent).as_posix(), match[0])
        for member in members()
        for path in shipped(member)
        if (match := pattern.search(path.read_text()))
    ]


def test_every_cache_of_calls_is_bounded_or_known() -> None:
    unbounded = re.compile(r"@(functools\.)?(cache\b|lru_cache\((maxsize=)?None\))")
    assert {name for name, _ in matches(unbounded)} == UNBOUNDED_CACHES


def test_nothing_starts_a_shell_or_unpickles_by_another_name() -> None:
    assert matches(UNSAFE) == []


def test_the_search_for_what_is_unsafe_can_fail() -> None:
    for line in ("a.recv()", "np.load(f, allow_pickle=True)", "run(c, shell=True)"):
        assert UNSAFE.search(line)
    assert not UNSAFE.search("sock.recv(RECEIVE); pipe.recv_bytes()")


@pytest.mark.own_python
def test_a_server_with_every_grammar_backend_imports_nothing_dangerous() -> None:
    modules = ["treadle_server.run", "treadle_server.app", "treadle.entrypoints.async_llm"]
    modules += [
        entry.module
        for member in plugins()
        for entry in member.entry_points
        if entry.kind in ("structured_output", "renderers", "tokenizers", "tool_parsers")
    ]
    code = (
        f"import importlib, json, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "import outlines_core, lmformatenforcer, llguidance\n"
        f"print(json.dumps([n for n in {NOT_IMPORTED!r} if n in sys.modules]))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    if "No module named" in process.stderr:
        pytest.skip(process.stderr.splitlines()[-1])
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout.splitlines()[-1]) == []
