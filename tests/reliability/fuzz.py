"""Send generated requests to a real server, innocent ones among them, and say what went wrong.

    python tests/reliability/fuzz.py --count 100000 --seed 1     # at random
    python tests/reliability/fuzz.py --everything                # each fragment in each place

The server is ``treadle serve`` with the demo model on the CPU.
Exits with 1 and names the requests if the server did anything else than it should:

* each request is answered, with 200 if it is sound and with less than 500 in any case;
* an error is JSON with a message, in which no path, address or traceback stands;
* the innocent requests get the same answer as alone;
* afterwards the server is well, its processes are the same ones, nothing runs and no page is in use;
* its log has no traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from generator import GeneratedRequest, Generator
from process import Process, served

__all__ = ("OPTIONS", "Report", "fuzz", "main", "requests_of")

MODEL = "demo:treadle-demo"
OPTIONS = ("--max-model-len", "256", "--max-num-seqs", "16", "--seed", "1")
CONCURRENT = 16
INNOCENT = 3
"""Innocent requests in each batch of ``CONCURRENT``."""
TIMEOUT = 120.0
LEAKS = re.compile(r"0x[0-9a-f]{6,}|Traceback|site-packages|\.py\b|/root/|/home/|object at ")
QUESTIONS = ("What is the capital of Italy?", "What is continuous batching?", "What is 3+4?")


def innocents() -> list[GeneratedRequest]:
    """Return greedy requests, streamed and not, whose answers must not depend on their neighbours."""
    bodies: list[tuple[str, dict[str, Any]]] = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        bodies.append(("/v1/chat/completions", {"messages": messages, "stream": True}))
        bodies.append(("/v1/completions", {"prompt": question, "logprobs": 2, "echo": True}))
    options = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    return [
        GeneratedRequest("POST", path, json.dumps(body | options).encode()) for path, body in bodies
    ]


@dataclass
class Report:
    """What was answered, and everything that should not have been."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    kib_before: int = 0
    kib_after: int = 0

    def __str__(self) -> str:
        statuses = ", ".join(f"{n} x {status}" for status, n in sorted(self.statuses.items()))
        faults = (
            "".join(f"\n  {n} x {f}" for f, n in Counter(self.faults).most_common(50)) or " none"
        )
        return (
            f"{self.statuses.total()} answers in {self.seconds:.0f} s: {statuses}\n"
            f"resident memory: {self.kib_before // 1024} MiB before, {self.kib_after // 1024} MiB "
            f"after\nfaults:{faults}"
        )


def requests_of(generator: Generator, count: int) -> Iterator[GeneratedRequest]:
    """Yield ``count`` requests: one for each field first, then others at random."""
    return islice(chain(generator.fields(), generator.requests()), count)


async def fuzz(
    server: Process, requests: Iterable[GeneratedRequest], seconds: float = 3600.0
) -> Report:
    """Send ``requests`` in batches, with innocent ones, and judge the answers.

    No batch begins after ``seconds``.
    """
    report, start_time = Report(), time.monotonic()
    # Less than the server's: a request on a connection that the server is closing gets no answer.
    limits = httpx.Limits(max_connections=CONCURRENT, keepalive_expiry=1.0)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=limits) as client:
        expected = {r.body: identity(r, await send(client, r)) for r in innocents()}
        processes = tree(server.process.pid)
        report.kib_before = resident(processes)
        turn, iterator = 0, iter(requests)
        while batch := list(islice(iterator, CONCURRENT - INNOCENT)):
            if time.monotonic() - start_time > seconds:
                break
            known = innocents()
            for _ in range(INNOCENT):
                batch.insert(turn % CONCURRENT, known[turn % len(known)])
                turn += 1
            answers = await asyncio.gather(*(send(client, r) for r in batch))
            for request, answer in zip(batch, answers, strict=True):
                report.statuses[getattr(answer, "status_code", 0)] += 1
                report.faults += judge(request, answer, expected)
        health = await client.get("/health")
        if health.status_code != 200:
            report.faults.append(f"/health: {health.status_code} {health.text}")
    report.seconds = time.monotonic() - start_time
    if not server.settles(30.0):
        report.faults.append("requests or pages are left")
    afterwards = tree(server.process.pid)
    if not set(server.children) & set(processes) or server.children[0] not in processes:
        report.faults.append("the engine's process was replaced")
    report.kib_after = resident(afterwards)
    log = server.log.read_text(errors="replace")
    report.faults += [f"log: {log[m.start() - 400 : m.start() + 800]}" for m in tracebacks(log)]
    return report


async def send(
    client: httpx.AsyncClient, request: GeneratedRequest
) -> httpx.Response | httpx.HTTPError:
    """Return the answer, or why there is none."""
    try:
        return await client.request(request.method, request.path, content=request.body)
    except httpx.HTTPError as error:
        return error


def judge(
    request: GeneratedRequest,
    answer: httpx.Response | httpx.HTTPError,
    expected: dict[bytes, Any],
) -> Iterator[str]:
    """Yield what is wrong with an answer."""
    title = request.name or f"{request.path} {request.body[:200]!r}"
    if isinstance(answer, httpx.HTTPError):
        yield f"{title}: no answer: {answer!r}"
        return
    text = answer.text
    if answer.status_code >= 500 or (not request.name and answer.status_code != 200):
        yield f"{title}: {answer.status_code} {text[:300]}"
    elif answer.status_code >= 400 and request.method != "HEAD":
        try:
            error = answer.json()["error"]
            message = error if isinstance(error, str) else error["message"]  # Ollama's is text
        except (ValueError, LookupError, TypeError):
            yield f"{title}: {answer.status_code} without a message: {text[:300]}"
        else:
            if LEAKS.search(message):
                yield f"{title}: the message leaks: {message[:300]}"
    elif request.body in expected and identity(request, answer) != expected[request.body]:
        yield f"{title}: another answer than alone: {text[:300]}"
    if answer.status_code == 200 and 'data: {"error"' in text:
        yield f"{title}: an error in the stream: {text[-300:]}"


def identity(request: GeneratedRequest, answer: httpx.Response | httpx.HTTPError) -> Any:
    """Return what must be the same whenever an innocent request is sent."""
    if isinstance(answer, httpx.HTTPError) or answer.status_code != 200:
        return None
    blocks = (
        answer.text.split("\n\n") if '"stream": true' in request.body.decode() else [answer.text]
    )
    data = [json.loads(b.removeprefix("data: ")) for b in blocks if b and "[DONE]" not in b]
    parts = [choice for answer in data for choice in answer["choices"]]
    text = "".join(p["text"] if "text" in p else p["delta"].get("content") or "" for p in parts)
    # Not the numbers: a sum's last bits depend on the size of the batch.
    tokens = [p["logprobs"]["tokens"] for p in parts if p.get("logprobs")]
    return text, parts[-1]["finish_reason"], tokens


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [c for thread in threads for c in (thread / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *chain.from_iterable(tree(int(child)) for child in children)]


def resident(pids: Sequence[int]) -> int:
    """Return the KiB of memory that the processes have, pages that they share counted once each."""
    total = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(n) for n in re.findall(r"^Pss: +(\d+)", status, re.M))
    return total


def tracebacks(log: str) -> Iterator[re.Match[str]]:
    return re.finditer(r"^Traceback", log, re.M)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--everything", action="store_true")
    parser.add_argument("--seconds", type=float, default=3600.0, help="when to stop at the latest")
    arguments = parser.parse_args()
    log = Path(tempfile.mkdtemp()) / "server.log"
    with served(MODEL, log, *OPTIONS) as server:
        document = server.client.get("/openapi.json").json()
        generator = Generator(document, arguments.seed)
        if arguments.everything:
            requests = generator.everything()
        else:
            requests = requests_of(generator, arguments.count)
        report = asyncio.run(fuzz(server, requests, arguments.seconds))
    print(report)
    print(f"seed {arguments.seed}; the server's log is {log}")
    return int(bool(report.faults))


if __name__ == "__main__":
    sys.exit(main())
