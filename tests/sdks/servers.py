"""What the tests beside this file expect of their server."""

from __future__ import annotations

import re

from process import Process

__all__ = ("KEY", "answers", "ends_well")

KEY = "sesame"
ANSWERS = re.compile(
    r'^treadle_http_requests_total\{method="(\w+)",route="([^"]+)",status="(\d+)"\} (\S+)', re.M
)


def answers(server: Process) -> dict[tuple[str, str], int]:
    """Return how many requests of each route were answered with each status."""
    page = server.client.get("/metrics").text
    return {(route, status): int(float(n)) for _, route, status, n in ANSWERS.findall(page)}


def ends_well(server: Process) -> None:
    """Check that nothing is left of the requests and that none failed."""
    assert server.settles(20.0), "requests or pages are left"
    assert {key for key in answers(server) if key[1] >= "500"} == set()
    assert "Traceback" not in server.log.read_text()
