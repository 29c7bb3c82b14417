"""What long texts cost others: a server of the demo model, asked by this process.

One JSON line for each figure. Seconds depend on what else the machine does: compare figures that
were measured by turns.

    python benchmarks/texts.py                      # the treadle of this interpreter
    python benchmarks/texts.py --python OTHER/bin/python
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

PARAMS: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
CUT = {"truncate_prompt_tokens": 1000}


def words(num_chars: int) -> str:
    """Return a text like English in its lengths of words."""
    rng = random.Random(num_chars)
    letters = "etaoinshrdlu"
    vocabulary = ["".join(rng.choices(letters, k=rng.randint(1, 8))) for _ in range(5000)]
    return " ".join(rng.choices(vocabulary, k=num_chars // 5 + 1))[:num_chars]


def resident_mib(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 >> 20


class Client:
    def __init__(self, http: httpx.AsyncClient, pid: int) -> None:
        self.http, self.pid = http, pid

    async def timed(self, path: str, body: Any) -> tuple[int, float]:
        """Return status and seconds of one request."""
        began = time.monotonic()
        answer = await self.http.post(path, json=body)
        return answer.status_code, round(time.monotonic() - began, 3)

    async def health_beside(self, path: str, body: Any) -> dict[str, Any]:
        """Return the longest that ``/health`` takes during a request."""
        request = asyncio.create_task(self.timed(path, body))
        longest = 0.0
        while not request.done():
            began = time.monotonic()
            await self.http.get("/health")
            longest = max(longest, time.monotonic() - began)
            await asyncio.sleep(0.005)
        status, seconds = await request
        return {"status": status, "seconds": seconds, "longest_health_s": round(longest, 3)}

    async def tokenize(self, num_chars: int) -> dict[str, Any]:
        before = resident_mib(self.pid)
        status, seconds = await self.timed("/tokenize", {"prompt": words(num_chars)})
        await asyncio.sleep(1.0)
        growth = resident_mib(self.pid) - before
        return {"status": status, "seconds": seconds, "resident_growth_mib": growth}

    async def chat_beside(self, count: int, num_chars: int, **fields: Any) -> dict[str, Any]:
        """Return how long a chat of two tokens takes beside ``count`` long ones."""
        text = words(num_chars)
        body = {"messages": [{"role": "user", "content": text}], **PARAMS, **fields}
        long = [asyncio.create_task(self.timed("/v1/chat/completions", body)) for _ in range(count)]
        await asyncio.sleep(0.5)
        short = {"messages": [{"role": "user", "content": "Hi"}], **PARAMS}
        status, seconds = await self.timed("/v1/chat/completions", short)
        results = await asyncio.gather(*long)
        return {
            "status": status,
            "seconds": seconds,
            "long_statuses": sorted({status for status, _ in results}),
            "longest_s": max(seconds for _, seconds in results),
        }


async def measure(url: str, pid: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        client = Client(http, pid)
        await client.timed(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}
        )
        prompt = {"prompt": words(1_000_000), **PARAMS}
        figures = {
            "health beside a prompt of 1 MB": client.health_beside("/v1/completions", prompt),
            "health beside 1 MB that is cut": client.health_beside("/v1/completions", prompt | CUT),
            "tokenize 1 MB": client.tokenize(1_000_000),
            "chat beside 12 of 800 kB": client.chat_beside(12, 800_000),
            "chat beside 12 of 800 kB that are cut": client.chat_beside(12, 800_000, **CUT),
            "tokenize 9 MB": client.tokenize(9_000_000),
        }
        for name, figure in figures.items():
            print(json.dumps({"figure": name, **await figure}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [options.python, "-m", "treadle_cli", "serve", "--port", str(port), "--device", "cpu"]
    server = subprocess.Popen([*command, "--cpu-threads", "1"], stdout=sys.stderr)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        asyncio.run(measure(url, server.pid))
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main()
