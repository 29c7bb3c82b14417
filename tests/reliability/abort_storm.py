"""Send clients that go away at every moment to a real server, and say what they have left behind.

    python tests/reliability/abort_storm.py --count 5000 --seed 1
    python tests/reliability/abort_storm.py --seconds 600 --seed 2

The server is ``treadle serve`` with the demo model on the CPU. The clients ask every route that generates, streamed and
not, and cancel batches; see ``departures.py``. Exits with 1 if, once they are gone,

* a request runs or waits, a page is in use, a grammar is waited for, or a batch has not ended;
* more tokens were generated than a fraction of those that they asked for;
* a process has more descriptors, or the server and its engine more threads, than after the first of the clients;
* part of an upload is left on the disk;
* a request in between that nobody aborted got another answer than it gets alone, or an answer was 5xx;
* the log has a traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from departures import BATCHES, FILES, Departure, Moment, depart, departures, form
from fuzz import identity, innocents, send, tracebacks, tree
from process import Process, served

__all__ = ("MODEL", "OPTIONS", "Report", "main", "options_for", "storm")

MODEL = "demo:treadle-demo"
OPTIONS = ("--max-model-len", "2048", "--max-num-seqs", "8", "--seed", "1")
GENERATED = "treadle_generation_tokens_total"
CLIENTS = 24
"""Clients at once: three times as many as run, so that most wait."""
WARM_UP = 48
"""Clients before the first count: processes and pools of threads start with use."""
BATCH_LINES = 6
PATIENCE = 30.0
SLACK = 4
"""Descriptors and threads more than before that are no leak: an idle thread, a fork that ends."""
MOST_GENERATED = 0.25
"""Share of the tokens that were asked for. Who leaves gets fewer than a hundred of 1,500."""
ENDED = ("completed", "cancelled", "failed", "expired")


@dataclass
class Report:
    """How many clients left when, and everything that they left behind."""

    left: Counter[tuple[str, Moment]] = field(default_factory=Counter)
    asked: int = 0
    generated: int = 0
    aborted: int = 0
    innocents: int = 0
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        faults = "".join(f"\n  {n} x {f}" for f, n in Counter(self.faults).most_common(50))
        moments: Counter[str] = Counter()
        for (_, moment), count in self.left.items():
            moments[moment] += count
        lines = "".join(f"\n  {count} {moment}" for moment, count in moments.most_common())
        return (
            f"{self.left.total()} clients left in {self.seconds:.0f} s:{lines}\n{self.aborted} outputs were "
            f"aborted, with {self.generated} of {self.asked} tokens, {self.innocents} answers in between\nbefore: {self.before}\nafter: {self.after}\n"
            f"faults:{faults or ' none'}"
        )


def options_for(folder: Path) -> tuple[str, ...]:
    return (*OPTIONS, "--files-dir", str(folder))


async def storm(
    server: Process, folder: Path, seed: int, count: int, seconds: float = 3600.0
) -> Report:
    """Send ``count`` clients, none after ``seconds``, and judge what is left.

    ``folder`` is the server's ``--files-dir``.
    """
    report, start_time = Report(), time.monotonic()
    batch_file = upload(server)
    clients = departures(seed, batch_file)
    others_first = departures(seed + 1, batch_file)
    async with httpx.AsyncClient(base_url=server.url, timeout=120.0) as client:
        expected = {r.body: identity(r, await send(client, r)) for r in innocents()}
    await crowd(server, islice(others_first, WARM_UP), Report(), start_time + seconds)
    report.faults += await asyncio.to_thread(leftovers, server, folder, {})
    report.before = resources(server)
    is_over = asyncio.Event()
    others = asyncio.create_task(bystander(server, expected, report, is_over))
    aborted, generated = outputs(server, "abort"), server.metric(GENERATED)
    await crowd(server, islice(clients, count), report, start_time + seconds)
    is_over.set()
    await others
    report.faults += await asyncio.to_thread(leftovers, server, folder, report.before)
    report.after = resources(server)
    report.aborted = outputs(server, "abort") - aborted
    report.generated = int(server.metric(GENERATED) - generated)
    if report.generated > MOST_GENERATED * report.asked:
        report.faults.append(f"{report.generated} tokens were generated for clients that had left")
    log = server.log.read_text(errors="replace")
    report.faults += [f"log: {log[m.start() - 400 : m.start() + 800]}" for m in tracebacks(log)]
    report.seconds = time.monotonic() - start_time
    return report


async def crowd(
    server: Process, clients: Iterator[Departure], report: Report, deadline: float
) -> None:
    """Let the clients come and go, ``CLIENTS`` at once."""
    host, port = server.client.base_url.host, server.client.base_url.port or 80

    async def one_after_another() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as control:
            for client in clients:
                if time.monotonic() > deadline:
                    return
                try:
                    read = await depart(host, port, client)
                except TimeoutError:
                    report.faults.append(f"{client.name}: no answer ({client.moment})")
                    continue
                report.left[client.name, client.moment] += 1
                report.asked += client.tokens
                status = read[9:12]
                if status >= b"500" or (client.moment is Moment.END and status != b"200"):
                    report.faults.append(f"{client.name}: {read[:600]!r}")
                if client.path == BATCHES and client.moment is Moment.END:
                    await control.post(f"{BATCHES}/{batch_id(read)}/cancel")

    await asyncio.gather(*(one_after_another() for _ in range(CLIENTS)))


async def bystander(
    server: Process, expected: dict[bytes, Any], report: Report, is_over: asyncio.Event
) -> None:
    """Send requests that nobody aborts, one after another, until the storm is over."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120.0) as client:
        while not is_over.is_set():
            for request in innocents():
                answer = await send(client, request)
                if identity(request, answer) != expected[request.body]:
                    what = getattr(answer, "text", repr(answer))[:300]
                    report.faults.append(f"{request.path}: another answer than alone: {what}")
                report.innocents += 1


# -- what is left -------------------------------------------------------------------------


def leftovers(server: Process, folder: Path, before: dict[str, int]) -> list[str]:
    """Wait until nothing is left, ``PATIENCE`` at most; returns what is."""
    for batch in server.client.get(BATCHES, params={"limit": 100}).json()["data"]:
        if batch["status"] not in ENDED:
            server.client.post(f"{BATCHES}/{batch['id']}/cancel")
    deadline = time.monotonic() + PATIENCE
    while found := list(found_now(server, folder, before)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return found


def found_now(server: Process, folder: Path, before: dict[str, int]) -> Iterator[str]:
    for name in (
        "treadle_num_requests_running",
        "treadle_num_requests_waiting",
        "treadle_kv_cache_pages_used",
        "treadle_num_grammars_waiting",
        "treadle_parser_threads_hung",
    ):
        if value := server.metric(name):
            yield f"{name} is {value:g}"
    if (active := server.metric("treadle_http_requests_active")) != 1:  # the one that asks
        yield f"treadle_http_requests_active is {active:g}"
    for batch in server.client.get(BATCHES, params={"limit": 100}).json()["data"]:
        if batch["status"] not in ENDED:
            yield f"a batch is {batch['status']}"
    if parts := [path.name for path in (folder / "uploads").iterdir()]:
        yield f"parts of uploads are left: {parts}"
    for name, number in resources(server).items():
        if number > before.get(name, number) + SLACK:
            yield f"{name}: {number}, {before[name]} before"


def resources(server: Process) -> dict[str, int]:
    """Count descriptors and threads of the server and of its engine, and all processes."""
    numbers = {"processes": len(tree(server.process.pid))}
    for name, pid in (("server", server.process.pid), ("engine", server.children[0])):
        numbers[f"descriptors of the {name}"] = len(os.listdir(f"/proc/{pid}/fd"))
        numbers[f"threads of the {name}"] = len(os.listdir(f"/proc/{pid}/task"))
    return numbers


def outputs(server: Process, reason: str) -> int:
    page = server.client.get("/metrics").text
    lines = [x for x in page.splitlines() if x.startswith("treadle_request_success_total")]
    return int(sum(float(x.split()[-1]) for x in lines if f'finished_reason="{reason}"' in x))


def upload(server: Process) -> str:
    """Upload the input of the batches; returns its id."""
    body = {"prompt": "What is 3+4?", "max_tokens": 100, "ignore_eos": True}
    request = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": str(i), **request}) for i in range(BATCH_LINES)]
    headers = {"content-type": "multipart/form-data; boundary=edge"}
    content = form("\n".join(lines).encode())
    answer = server.client.post(FILES, content=content, headers=headers)
    return str(answer.raise_for_status().json()["id"])


def batch_id(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["id"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=60.0, help="when to stop at the latest")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    log = Path(tempfile.mkdtemp()) / "server.log"
    folder = log.with_name("files")
    with served(Path(MODEL), log, *options_for(folder)) as server:
        report = asyncio.run(
            storm(server, folder, arguments.seed, arguments.count, arguments.seconds)
        )
    print(report)
    print(f"seed {arguments.seed}; the server's log is {log}")
    return int(bool(report.faults))


if __name__ == "__main__":
    sys.exit(main())
