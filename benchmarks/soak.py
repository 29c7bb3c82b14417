"""Memory of a server under traffic that never repeats: each minute, every process and every cache.

Prompts have ever new lengths, schemas, patterns, tools and template arguments are new with each request,
streams are left in the middle, and some bodies are wrong. A client that waits for its answers sends
the next request at once, so the load does not depend on the machine. The run fails if the server
answers with a 5xx, keeps anything when it is idle, or grows by more than ``--growth`` after ``--settle``.

    python benchmarks/soak.py --minutes 60
    python benchmarks/soak.py --minutes 15 -- --dtype float32 --structured-output-backends outlines

What stands behind ``--`` goes to ``treadle serve``. On the standard output is one JSON line a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from treadle_server.child_processes import resident_bytes

MAX_LEN = 2048
BACKENDS = ("llguidance", "outlines", "lm-format-enforcer")
CACHE = ("--kv-cache-memory-bytes", str(64 * 2**20))
"""A cache that is full after a minute: memory that was never written to is not resident."""


class Traffic:
    """Requests of one seed. Each has something that no request before it had."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = 0
        self.kinds = (
            *[self.completion] * 6,
            *[self.chat] * 4,
            *[self.structured] * 3,
            *[self.tools] * 2,
            self.tokenize,
            self.detokenize,
            self.wrong,
            self.elsewhere,
        )

    def next(self) -> tuple[str, dict[str, Any] | bytes]:
        """Return the path and the body of a request."""
        self.count += 1
        return self.random.choice(self.kinds)()

    def word(self) -> str:
        return "".join(
            self.random.choices("abcdefghijklmnopqrstuvwxyz", k=self.random.randint(2, 9))
        )

    def text(self, words: int) -> str:
        return " ".join(self.word() for _ in range(words))

    def options(self) -> dict[str, Any]:
        """Sampling parameters, a few of many in each request."""
        draw = self.random
        every = {
            "n": draw.randint(1, 4),
            "temperature": draw.uniform(0.0, 1.5),
            "top_p": draw.uniform(0.3, 1.0),
            "top_k": draw.randint(1, 100),
            "min_p": draw.uniform(0.0, 0.2),
            "seed": draw.getrandbits(40),
            "stop": [self.word() for _ in range(draw.randint(1, 4))],
            "presence_penalty": draw.uniform(-1.0, 1.0),
            "repetition_penalty": draw.uniform(0.8, 1.3),
            "logit_bias": {str(draw.randrange(4000)): draw.uniform(-50.0, 50.0) for _ in range(8)},
            "bad_words": [self.word() for _ in range(4)],
            "cache_salt": self.word(),
        }
        chosen = draw.sample(sorted(every), k=draw.randint(0, 4))
        limits = {"max_tokens": draw.randint(1, 64), "stream": draw.random() < 0.5}
        return {name: every[name] for name in chosen} | limits

    def completion(self) -> tuple[str, dict[str, Any]]:
        body = {"prompt": self.text(self.random.randint(1, MAX_LEN // 6)), **self.options()}
        if self.random.random() < 0.3:
            body["logprobs"] = self.random.randint(1, 5)
        elif self.random.random() < 0.2:
            body |= {"prompt_logprobs": self.random.randint(1, 5), "stream": False}
        return "/v1/completions", body

    def conversation(self) -> dict[str, Any]:
        roles = ["system", *["user", "assistant"] * self.random.randint(0, 3), "user"]
        messages = [{"role": r, "content": self.text(self.random.randint(1, 40))} for r in roles]
        return {
            "messages": messages,
            "chat_template_kwargs": {f"arg_{self.count}": self.word(), "enable_thinking": False},
        }

    def chat(self) -> tuple[str, dict[str, Any]]:
        body = {**self.conversation(), **self.options()}
        if self.random.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": 3}
        return "/v1/chat/completions", body

    def schema(self) -> dict[str, Any]:
        types = ("string", "integer", "boolean", "number")
        names = [f"{self.word()}_{self.count}" for _ in range(self.random.randint(1, 4))]
        properties = {name: {"type": self.random.choice(types)} for name in names}
        return {"type": "object", "properties": properties, "required": names}

    def structured(self) -> tuple[str, dict[str, Any]]:
        form = self.random.choice(("json", "regex", "choice"))
        value = {
            "json": self.schema(),
            "regex": f"{self.word()}[0-9]{{1,{self.random.randint(1, 9)}}}({self.word()})?",
            "choice": [self.word() for _ in range(self.random.randint(1, 12))],
        }[form]
        backend = {"guided_decoding_backend": self.random.choice(BACKENDS)}
        limits = {"max_tokens": self.random.randint(1, 48)}
        return "/v1/chat/completions", {
            **self.conversation(),
            **backend,
            **limits,
            "structured_outputs": {form: value},
        }

    def tools(self) -> tuple[str, dict[str, Any]]:
        functions = [
            {
                "name": f"{self.word()}_{self.count}",
                "description": self.text(8),
                "parameters": self.schema(),
            }
            for _ in range(self.random.randint(1, 3))
        ]
        return "/v1/chat/completions", {
            **self.conversation(),
            "max_tokens": self.random.randint(1, 48),
            "stream": self.random.random() < 0.5,
            "tools": [{"type": "function", "function": function} for function in functions],
            "tool_choice": self.random.choice(("auto", "required", "none")),
        }

    def tokenize(self) -> tuple[str, dict[str, Any]]:
        if self.random.random() < 0.5:
            return "/tokenize", self.conversation()
        return "/tokenize", {
            "prompt": self.text(self.random.randint(1, 300)),
            "return_token_strs": True,
        }

    def detokenize(self) -> tuple[str, dict[str, Any]]:
        return "/detokenize", {
            "tokens": self.random.choices(range(4000), k=self.random.randint(1, 500))
        }

    def wrong(self) -> tuple[str, dict[str, Any] | bytes]:
        bodies: list[dict[str, Any] | bytes] = [
            {"prompt": self.text(4), "temperature": -self.count},
            {"prompt": self.text(MAX_LEN)},
            {"prompt": "", "model": self.word()},
            {"prompt": "a", "structured_outputs": {"regex": f"({self.word()}"}},
            self.text(9).encode(),
        ]
        return "/v1/completions", self.random.choice(bodies)

    def elsewhere(self) -> tuple[str, dict[str, Any]]:
        return f"/v1/{self.word()}/{self.count}", {}


@asynccontextmanager
async def server(options: Sequence[str], log: Path) -> AsyncIterator[tuple[int, str]]:
    """Start ``treadle serve``; yield its process id and its URL."""
    command = [sys.executable, "-m", "treadle_cli", "serve", "--port", "0", "--device", "cpu"]
    with log.open("w") as out:
        process = subprocess.Popen([*command, *CACHE, *options], stdout=out, stderr=out)
    try:
        while (match := re.search(r"^listening +(http\S+)$", log.read_text(), re.M)) is None:
            if process.poll() is not None:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            await asyncio.sleep(0.1)
        yield process.pid, match[1]
    finally:
        process.terminate()
        process.wait(60)


async def client(url: str, traffic: Traffic, counts: Counter[str], end: float) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        while time.monotonic() < end:
            path, body = traffic.next()
            leaves = traffic.random.random() < 0.1
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"x-request-id": f"{traffic.count}"}
            async with http.stream("POST", path, content=content, headers=headers) as response:
                counts[f"{response.status_code // 100}xx"] += 1
                with suppress(httpx.StreamConsumed):
                    async for _ in response.aiter_bytes():
                        if leaves:  # the connection is closed with an answer on its way
                            counts["left"] += 1
                            break


async def observe(pid: int, url: str, counts: Counter[str], minutes: int) -> list[dict[str, Any]]:
    """Print a line each minute, and return them."""
    lines: list[dict[str, Any]] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        for minute in range(1, minutes + 1):
            await asyncio.sleep(60)
            page = (await http.get("/metrics")).text
            caches = re.findall(
                r'^treadle_cache_(entries|bytes){.*cache="(\w+)".*} (\S+)$', page, re.M
            )
            sizes = {role: round(size / 1e6, 1) for role, size in resident_bytes(pid).items()}
            line = {
                "minute": minute,
                "total_mb": round(sum(sizes.values()), 1),
                "mb": sizes,
                "requests": dict(counts),
                "caches": {f"{cache}.{unit}": float(value) for unit, cache, value in caches},
            }
            print(json.dumps(line), flush=True)
            lines.append(line)
    return lines


async def is_idle(url: str) -> bool:
    """Whether the engine has let go of every request and page within half a minute."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for _ in range(300):
            page = (await http.get("/metrics")).text
            names = "num_requests_running|num_requests_waiting|kv_cache_pages_used"
            if not any(map(float, re.findall(rf"^treadle_(?:{names}){{.*}} (\S+)$", page, re.M))):
                return True
            await asyncio.sleep(0.1)
    return False


async def soak(arguments: argparse.Namespace, log: Path) -> list[str]:
    """Run it, and return what is wrong."""
    traffic, counts = Traffic(arguments.seed), Counter[str]()
    async with server(arguments.server_options, log) as (pid, url):
        end = time.monotonic() + 60 * arguments.minutes
        observation = asyncio.create_task(observe(pid, url, counts, arguments.minutes))
        clients = [client(url, traffic, counts, end) for _ in range(arguments.clients)]
        await asyncio.gather(*clients)
        lines = await observation
        faults = [] if await is_idle(url) else ["the engine keeps requests or pages when idle"]
    if counts["5xx"]:
        faults.append(f"{counts['5xx']} answers with a status of 5xx")
    settled = [line["total_mb"] for line in lines if line["minute"] >= arguments.settle]
    # Of the last ten minutes the median: a fork that compiles a grammar has its parent's pages, too.
    if len(settled) > 1 and (last := median(settled[-10:])) > settled[0] * (1 + arguments.growth):
        faults.append(f"grew from {settled[0]} MB at minute {arguments.settle} to {last} MB")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--clients", type=int, default=8, help="requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--settle", type=int, default=10, help="minutes after which it may not grow"
    )
    parser.add_argument("--growth", type=float, default=0.1, help="share that counts as no growth")
    parser.add_argument("server_options", nargs="*", help="options of treadle serve")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with TemporaryDirectory() as folder:
        if faults := asyncio.run(soak(arguments, Path(folder) / "log")):
            raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    main()
