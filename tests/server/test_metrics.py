from __future__ import annotations

import re

from scripted import ScriptedEngine
from serving import serving

from treadle_server.histogram import Histogram


def value(page: str, name: str, **labels: str) -> float:
    for line in page.splitlines():
        has_labels = all(f'{k}="{v}"' in line for k, v in labels.items())
        if has_labels and re.match(rf"{name}[{{ ]", line):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no {name} {labels} in\n{page}")


async def test_the_numbers_are_those_of_the_client() -> None:
    async with serving() as server:
        for i in range(10):
            await server.chat(stream=i < 4)
        await server.complete(n=0)
        page = (await server.client.get("/metrics")).text
    chat = {"route": "/v1/chat/completions"}
    assert value(page, "treadle_http_requests_total", method="POST", status="200", **chat) == 10
    assert value(page, "treadle_http_requests_total", status="400", route="/v1/completions") == 1
    assert value(page, "treadle_http_request_seconds_count", **chat) == 10
    assert value(page, "treadle_time_to_first_token_seconds_count") == 4
    assert value(page, "treadle_inter_token_latency_seconds_count") == 12
    assert value(page, "treadle_e2e_request_latency_seconds_count") == 10
    assert value(page, "treadle_request_generation_tokens_sum") == 110
    assert value(page, "treadle_request_prompt_tokens_bucket", le="8.0") == 10
    assert value(page, "treadle_request_success_total", reason="stop") == 10
    assert value(page, "treadle_engine_up", model_name="scripted") == 1
    assert value(page, "treadle_http_requests_active") == 1  # the scrape itself
    assert value(page, "process_open_fds") > 0


async def test_no_client_can_add_a_series() -> None:
    async with serving() as server:
        for i in range(30):
            await server.client.request(f"FOO{i}", f"/nope/{i}")
            await server.client.request("PUT", f"/nope/{i}")
            await server.client.get(f"/v1/models/m{i}")
            await server.complete(model=f"m{i}", user=f"u{i}")
        await server.client.get("/metrics")
        before = (await server.client.get("/metrics")).text
        for i in range(30, 60):
            await server.client.request("PUT", f"/nope/{i}")
            await server.client.get(f"/v1/models/m{i}")
            await server.complete(model=f"m{i}")
        after = (await server.client.get("/metrics")).text
    assert "m3" not in after and "nope" not in after and "FOO" not in after
    assert len(after.splitlines()) - len(before.splitlines()) == 0


async def test_metrics_survive_the_engine_and_can_be_switched_off() -> None:
    engine = ScriptedEngine()
    async with serving(engine, enable_request_metrics=False) as server:
        await server.chat(stream=True)
        page = (await server.client.get("/metrics")).text
        assert value(page, "treadle_time_to_first_token_seconds_count") == 0
        assert value(page, "treadle_http_requests_total", method="POST") == 1


def test_a_histogram_counts_up_to_and_with_its_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for observed in (0.5, 1.0, 1.5, 2.0, 99.0):
        histogram.observe(observed)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.sum == 104.0
