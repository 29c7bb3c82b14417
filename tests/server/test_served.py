"""The fixture ``serve`` of ``treadle.testing``: a real server with a plugin under test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from treadle.testing.served import RunningServer, serve

__all__ = ("serve",)

POLICY = """
from treadle.api import impl
from treadle.scheduler.policies import FirstCome

TREADLE = {"scheduling_policies": ["mine"]}


class Mine(FirstCome):
    def sort_key(self, request):
        if request.num_prompt_tokens > 60:
            raise ValueError("too long for mine")
        return super().sort_key(request)


@impl
def treadle_scheduling_policy(name):
    return Mine()
"""


@pytest.fixture(scope="module")
def server(
    serve: Callable[..., RunningServer], tmp_path_factory: pytest.TempPathFactory
) -> RunningServer:
    file = tmp_path_factory.mktemp("plugin") / "mine.py"
    file.write_text(POLICY)
    return serve("--plugin-file", str(file), "--scheduling-policy", "mine")


def test_the_plugin_under_test_serves_requests(server: RunningServer) -> None:
    answer = server.chat("Hello", max_tokens=3, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3
    failed = server.ask("/v1/completions", {"prompt": "word " * 80, "max_tokens": 1})
    assert failed.status == 500 and "too long for mine" in failed.json["error"]["message"]
    assert server.ask("/health").status == 200
    assert "scheduling_policies:mine" in server.log


def test_a_server_that_ends_badly_is_a_failure(serve: Callable[..., RunningServer]) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)exited with status 2.*no plugin provides"):
        RunningServer("--scheduling-policy", "nobody-has-it")


def test_the_server_ends(server: RunningServer) -> None:
    server.close()
    assert server.process.returncode == 0
    assert "Traceback" not in server.log
