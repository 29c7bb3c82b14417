"""What structured output costs: a backend's own work, the wait for a grammar, and the time of a step.

::

    python benchmarks/structured_output.py                 # with the tokenizer of the demo model
    python benchmarks/structured_output.py --vocab 151936  # with a synthetic vocabulary: a backend's work only
    python benchmarks/structured_output.py --record demo:treadle-demo  # 5 only, with a model
    python benchmarks/structured_output.py --guided FOLDER --load-format dummy  # 6 only, on a card

1.  Each backend on its own, in one thread: CPU time until it is ready and to compile a few
    grammars, then the time to fill the mask of a row and to accept a token, along texts that are
    sampled from its masks.
2.  Milliseconds until the first token of a request to an engine: without a grammar, with the first
    one of all (the compiling process starts), with a new one, and with one that is known.
3.  The same for a new grammar of two values: alone, and beside four regexes that no limit suffices
    for, of another client and of the same one.
4.  Milliseconds of CPU time of a step in which every row is inside of a JSON string, and in which
    none is.
5.  Tokens per second of a record of fixed keys and short values, with the tokens that the grammar
    forces computed together and one by one.
6.  Tokens per second of 32 and 256 requests of 64 ids in and 256 out, free and with the record of 1 as
    the schema, by turns. The first pass of each is not counted.

Of 2 and 4 the best of five passes, of 3 the worst; only the first grammar comes once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from treadle_hf_tokenizer.tokenizer import AutoTokenizer

from treadle import LLM
from treadle.api.files import ModelFiles
from treadle.api.kinds import STRUCTURED_OUTPUT
from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams, StructuredOutputsParams
from treadle.api.structured_output import CompiledGrammar, GrammarSpec
from treadle.api.types import Tokenizer
from treadle.config import from_options
from treadle.engine.core import EngineCore
from treadle.plugins import PluginManager
from treadle.processes.isolated import limit_cpu, limit_memory
from treadle.structured_output.checker import CPU_SECONDS, MEMORY
from treadle.structured_output.state import StructuredOutputState
from treadle.testing.grammar_vocabulary import SmallTokenizer

TEXT = {"type": "string"}
GRAMMARS: dict[str, GrammarSpec] = {
    name: GrammarSpec("json_schema", json.dumps(schema))
    for name, schema in {
        "record": {
            "type": "object",
            "properties": {
                **{f"field_{i}": TEXT for i in range(6)},
                "size": {"type": "integer"},
                "kind": {"enum": ["small", "large", "other"]},
                "owner": {
                    "type": "object",
                    "properties": {"name": TEXT, "age": {"type": "integer"}},
                    "required": ["name", "age"],
                },
                "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
            },
            "required": ["field_0", "field_1", "field_2", "size", "kind", "owner", "tags"],
        },
        "50 properties": {"type": "object", "properties": {f"p{i}": TEXT for i in range(50)}},
        "500 values": {"enum": [f"the value {i} of many" for i in range(500)]},
        "maxLength 500": {"type": "object", "properties": {"a": {**TEXT, "maxLength": 500}}},
        "maxLength 2000": {"type": "object", "properties": {"a": {**TEXT, "maxLength": 2000}}},
        "array of anything": {"type": "array"},
    }.items()
}
GRAMMARS["any object"] = GrammarSpec("json_object", "{}")
GRAMMARS["regex"] = GrammarSpec("regex", r"[A-Z][a-z]{2,20} [0-9]{1,4}(, [A-Z]{2})?")


class Synthetic(SmallTokenizer):
    """All bytes, and words, spaces and signs in the proportions of a real vocabulary."""

    def __init__(self, size: int) -> None:
        super().__init__()
        rng = random.Random(0)
        tokens = set(self._tokens)
        letters = "etaoinshrdlcumwfgypbvkjxqz"
        signs = ['"', '":', '",', "{", "}", "[", "]", "(", ");", "//", "\n", "\t", "  ", "=", "."]
        while len(tokens) < size - 8:
            word = "".join(rng.choices(letters, range(26, 0, -1), k=rng.randint(2, 9)))
            draw = rng.random()
            if draw < 0.45:
                word = " " + word
            elif draw < 0.55:
                word = word.capitalize()
            elif draw < 0.62:
                word = rng.choice(signs) + rng.choice([word, *signs])
            elif draw < 0.80:  # other scripts
                first = rng.choice([0x430, 0x4E00, 0x3B1, 0xAC00, 0x5D0])
                word = "".join(chr(first + rng.randrange(24)) for _ in range(rng.randint(1, 4)))
            tokens.add(word.encode())
        self._tokens = [*self._tokens, *sorted(tokens - set(self._tokens))]


# The inside of a JSON string, where most tokens of a JSON text are; it never has to end.
STRING = r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])+'
BATCHES = (1, 8, 32)
STEPS, PASSES = 48, 5
NUM_BAD = 4


def demo() -> Tokenizer:
    import treadle_demo

    return AutoTokenizer.open(ModelFiles(Path(treadle_demo.__file__).parent / "model", (), {}))


# ------------------------------------------------------------------------ a backend on its own


def backends(plugins: PluginManager, names: list[str], vocab: int | None, seconds: float) -> None:
    tokenizer: Tokenizer = Synthetic(vocab) if vocab else demo()
    size = vocab or tokenizer.vocab_size
    print(f"{size} ids")
    for name in names:
        before, start = memory(), time.process_time()
        compiler = plugins.create(STRUCTURED_OUTPUT, name, tokenizer=tokenizer, vocab_size=size)
        ready = time.process_time() - start
        print(f"\n{name}: ready after {ready:.2f} s, {memory() - before} MiB")
        print(f"{'':20}{'compile, ms':>12}{'fill, us':>10}{'p99':>8}{'accept':>8}{'rows/s':>10}")
        for title, spec in GRAMMARS.items():
            reason = compiler.unsupported_reason(spec)
            if reason is not None:
                print(f"{title:20}{reason}")
                continue
            if not within_limits(lambda: compiler.compile(spec)):  # noqa: B023
                print(f"{title:20}beyond the limits of {CPU_SECONDS:g} s and {MEMORY >> 20} MiB")
                continue
            start = time.process_time()
            grammar = compiler.compile(spec)
            compiled = (time.process_time() - start) * 1e3
            fill_times, accept_times = walks(grammar, size, seconds)
            mean, accept = statistics.mean(fill_times) * 1e6, statistics.mean(accept_times) * 1e6
            p99 = sorted(fill_times)[int(len(fill_times) * 0.99)] * 1e6
            rows = 1e6 / (mean + accept)
            print(f"{title:20}{compiled:12.1f}{mean:10.1f}{p99:8.0f}{accept:8.1f}{rows:10,.0f}")


def within_limits(call: Callable[[], Any]) -> bool:
    """Whether a copy of this process survives it within the limits that an engine sets."""
    child = os.fork()
    if child == 0:
        limit_memory(MEMORY)
        limit_cpu(CPU_SECONDS)
        call()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def walks(grammar: CompiledGrammar, vocab: int, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of each fill and of each accept along 20 random texts, or as many as there is time."""
    fill_times: list[float] = []
    accept_times: list[float] = []
    mask = torch.zeros((1, -(-vocab // 32)), dtype=torch.int32)
    start = time.monotonic()
    for seed in range(20):
        matcher, rng = grammar.matcher(), random.Random(seed)
        for _ in range(120):
            fill_times.append(timed(matcher.fill_bitmask, mask, 0))
            bits = mask[0].numpy().view("uint8")
            allowed = [
                i * 8 + bit for i in bits.nonzero()[0] for bit in range(8) if bits[i] >> bit & 1
            ]
            if not allowed:
                break
            token = int(rng.choice(allowed))
            accept_times.append(timed(matcher.accept_token, token))
            if matcher.is_terminated:
                break
        if time.monotonic() - start > seconds:
            break
    return fill_times, accept_times


def timed(call: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def memory() -> int:
    """Most MiB that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


# ----------------------------------------------------------------------------- inside an engine


class Engine:
    """The demo model, put to work without text or sockets."""

    def __init__(self) -> None:
        config = from_options(
            model="demo:treadle-demo", device="cpu", cpu_threads=1, num_pages=1024
        )
        self.core = EngineCore(config, PluginManager(config.plugins))
        self._count = 0

    def add(
        self, structured_outputs: StructuredOutputsParams | None, tokens: int, client: str = ""
    ) -> str:
        """Return the id of the request."""
        self._count += 1
        params = SamplingParams(
            temperature=1.0,
            seed=self._count,
            max_tokens=tokens,
            ignore_eos=True,
            structured_outputs=structured_outputs,
        )
        prompt = [(self._count * 7 + i) % 4000 + 10 for i in range(16)]
        request_id = str(self._count)
        self.core.add_request(
            EngineRequest(request_id, prompt, params, time.monotonic(), client=client)
        )
        return request_id

    def step(self) -> list[str]:
        """Return the ids of the requests that have a token."""
        outputs = self.core.step()
        for output in outputs:
            if output.error is not None and "within" not in output.error:
                raise RuntimeError(output.error)
        return [output.id for output in outputs]

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def first_token(self, structured_outputs: StructuredOutputsParams | None) -> float:
        """Milliseconds from a request to its only token."""
        self.add(structured_outputs, 1)
        return timed(self.run) * 1e3

    def first_token_beside(self, backend: str, client: str, num_bad: int) -> float:
        """Milliseconds to the only token of ``client``, after bad regexes of the client ``bad``."""
        bad = []
        for _ in range(num_bad):
            regex = f"(a{{1,1000}}){{1,{1000 + self._count}}}"
            params = StructuredOutputsParams(regex=regex, backend=backend)
            bad.append(self.add(params, 1, client="bad"))
        self.step()
        start = time.perf_counter()
        choice = [f"yes {self._count}", "no"]
        wanted = self.add(StructuredOutputsParams(choice=choice, backend=backend), 1, client)
        while wanted not in self.step():
            pass
        elapsed = time.perf_counter() - start
        self.core.abort_requests(bad)
        self.run()
        return elapsed * 1e3

    def step_time(self, rows: int, structured_outputs: StructuredOutputsParams | None) -> float:
        """Milliseconds of CPU time of a step with ``rows`` sequences that decode."""
        best_ms = float("inf")
        for _ in range(PASSES):
            for _ in range(rows):
                self.add(structured_outputs, STEPS + 8)
            while self.core.stats.num_waiting or self.core.stats.num_running < rows:
                self.step()
            start = time.process_time()
            for _ in range(STEPS):
                self.step()
            best_ms = min(best_ms, (time.process_time() - start) / STEPS * 1e3)
            self.run()
        return best_ms


def engines(names: list[str]) -> None:
    schema = json.loads(GRAMMARS["record"].source)
    print(f"\nms to the first token\n{'':20}{'free':>10}{'first':>10}{'new':>10}{'known':>10}")
    steps, beside = [], []
    for name in names:
        engine = Engine()
        try:
            engine.first_token(None)
            first_ms = engine.first_token(StructuredOutputsParams(regex="[a-z]{8}", backend=name))
            params = [
                StructuredOutputsParams(json={**schema, "title": str(i)}, backend=name)
                for i in range(PASSES)
            ]
            free_ms = min(engine.first_token(None) for _ in params)
            new_ms = min(engine.first_token(structured_outputs) for structured_outputs in params)
            cached_ms = min(engine.first_token(structured_outputs) for structured_outputs in params)
            print(f"{name:20}{free_ms:10.1f}{first_ms:10.1f}{new_ms:10.1f}{cached_ms:10.1f}")
            alone = [engine.first_token_beside(name, "good", 0) for _ in range(PASSES)]
            others = [engine.first_token_beside(name, "good", NUM_BAD) for _ in range(PASSES)]
            own = [engine.first_token_beside(name, "bad", NUM_BAD) for _ in range(PASSES)]
            beside.append((name, max(alone), max(others), max(own)))
            string = StructuredOutputsParams(regex=STRING, backend=name)
            engine.first_token(string)
            for rows in BATCHES:
                steps.append(
                    (name, rows, engine.step_time(rows, None), engine.step_time(rows, string))
                )
        finally:
            engine.core.close()
    print(
        f"\nms to the first token beside {NUM_BAD} bad regexes\n{'':20}{'alone':>10}"
        f"{'another client':>16}{'same client':>14}"
    )
    for name, alone_ms, others_ms, own_ms in beside:
        print(f"{name:20}{alone_ms:10.1f}{others_ms:16.1f}{own_ms:14.1f}")
    print(
        f"\nms of CPU time of a step\n{'':20}{'rows':>10}{'free':>10}{'grammar':>10}{'us per row':>14}"
    )
    for name, rows, free_ms, constrained_ms in steps:
        print(
            f"{name:20}{rows:10}{free_ms:10.2f}{constrained_ms:10.2f}{(constrained_ms - free_ms) / rows * 1e3:14.0f}"
        )


# ------------------------------------------------------------- tokens that the grammar forces

NAMES = ("temperature", "humidity", "pressure", "wind_speed", "visibility", "cloud_cover")
VALUES = {
    **{name: {"type": "integer", "minimum": 0, "maximum": 99} for name in NAMES},
    "condition": {"enum": ["clear sky", "overcast", "thunderstorm"]},
    "unit_system": {"enum": ["metric", "imperial"]},
}
RECORD = {
    "type": "object",
    "properties": VALUES,
    "required": list(VALUES),
    "additionalProperties": False,
}


def records(model: str, load_format: str, tokenizer: str) -> None:
    """Print both rates, in turns. ``tokenizer`` is that of a model without one."""
    ways: dict[str, Callable[..., list[int]]] = {
        "together": StructuredOutputState.forced_tokens,
        "one by one": lambda _: [],
    }
    shape = {"tokenizer": tokenizer, "hf_overrides": {"vocab_size": demo().vocab_size}}
    options: dict[str, Any] = {"load_format": load_format} | (shape if tokenizer else {})
    with LLM(model=model, max_model_len=1024, **options) as llm:
        guided = StructuredOutputsParams(json=RECORD, disable_any_whitespace=True)
        for rows in BATCHES:
            params = [
                SamplingParams(temperature=1.0, seed=i, max_tokens=300, structured_outputs=guided)
                for i in range(rows)
            ]
            rates: dict[str, list[float]] = {way: [] for way in ways}
            steps: dict[str, int] = {}
            outputs: dict[str, list[list[int]]] = {}
            llm.generate(["The weather:"] * rows, params, use_tqdm=False)
            for way in list(ways) * PASSES:
                setattr(StructuredOutputState, "forced_tokens", ways[way])  # noqa: B010
                first, start = llm.stats.num_steps, time.perf_counter()
                done = llm.generate(["The weather:"] * rows, params, use_tqdm=False)
                seconds = time.perf_counter() - start
                outputs[way] = [output.outputs[0].token_ids for output in done]
                rates[way].append(sum(map(len, outputs[way])) / seconds)
                steps[way] = llm.stats.num_steps - first
            print(f"{rows} rows of about {len(outputs['together'][0])} tokens: ", end="")
            print("; ".join(f"{way} {max(rates[way]):.1f}/s, {steps[way]} steps" for way in ways))
            same = sum(map(list.__eq__, *outputs.values()))
            print(f"{same} of {rows} outputs are the same")


def guided(model: str, load_format: str) -> None:
    """Print the rates of every pass, and the ratio of the best ones."""
    schema = StructuredOutputsParams(json=json.loads(GRAMMARS["record"].source))
    with LLM(
        model=model,
        load_format=load_format,
        max_model_len=1024,
        max_num_seqs=256,
        enable_prefix_caching=False,
    ) as llm:
        for rows in (32, 256):
            rates: dict[bool, list[float]] = {False: [], True: []}
            for is_guided in [False, True] * (PASSES + 1):
                params = [
                    SamplingParams(
                        temperature=0.6,
                        seed=i,
                        max_tokens=256,
                        ignore_eos=True,
                        structured_outputs=schema if is_guided else None,
                    )
                    for i in range(rows)
                ]
                start = time.perf_counter()
                outputs = llm.generate(
                    [[100 + i] * 64 for i in range(rows)], params, use_tqdm=False
                )
                seconds = time.perf_counter() - start
                tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                rates[is_guided].append(tokens / seconds)
            free, held = (rates[way][1:] for way in (False, True))
            print(f"{rows} rows, free:", *(f"{rate:,.0f}" for rate in free))
            print(f"{rows} rows, guided:", *(f"{rate:,.0f}" for rate in held))
            print(f"{rows} rows: {max(held) / max(free):.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, help="size of a synthetic vocabulary")
    parser.add_argument("--record", metavar="MODEL", help="measure 5 only, with this model")
    parser.add_argument("--guided", metavar="MODEL", help="measure 6 only, with this model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--tokenizer", default="", help="for a model that has none")
    parser.add_argument("--backend", action="append", help="repeatable; default: all")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="longest walk through one grammar"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.record:
        records(options.record, options.load_format, options.tokenizer)
        return
    if options.guided:
        guided(options.guided, options.load_format)
        return
    plugins = PluginManager()
    names = options.backend or list(plugins.keys("structured_output"))
    backends(plugins, names, options.vocab, options.seconds)
    if options.vocab is None:
        engines(names)


if __name__ == "__main__":
    main()
