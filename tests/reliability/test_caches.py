"""Every cache that requests can fill has a bound and a gauge.

A new cache of the engine is a field of ``EngineStats.caches`` and a row of ``FILL``; one that is made by
a decorator without a bound is named in ``CLOSED`` with the reason why no request can fill it.
"""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from treadle import LLM, SamplingParams
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.api.stats import CacheStats, EngineStats
from treadle.config import LIBRARY_ENVIRONMENT, set_library_environment
from treadle.structured_output import compile_queue
from treadle_server.child_processes import resident_bytes
from treadle_server.metrics import Metrics

ROOT = Path(__file__).parents[2]
PAGES = 16

CLOSED = {
    "members": "protocols of plugins",
    "attributes": "protocols of plugins",
    "_class_of": "protocols of plugins",
    "_shared_layout": "widths of the model's heads",
    "assembly": "the number formats of a checkpoint",
    "num_sms": "devices",
    "smem_layout": "swizzles and sizes of elements",
    "biased_levels": "types of activations",
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model="demo:treadle-demo", device="cpu", cpu_threads=1, num_pages=PAGES + 1) as llm:
        yield llm


def send(llm: LLM, prompt: list[int], **params: object) -> None:
    llm.generate([prompt], SamplingParams(max_tokens=1, **params), use_tqdm=False)  # type: ignore[arg-type]


def new_grammars(llm: LLM, count: int) -> None:
    for number in range(count):
        choice = StructuredOutputsParams(choice=[f"yes {number}", f"no {number}"])
        send(llm, [300, 301], structured_outputs=choice)


def new_prefixes(llm: LLM, count: int) -> None:
    draw = random.Random(0)
    for _ in range(count):
        send(llm, [draw.randrange(300, 4000) for _ in range(33)])


FILL: dict[str, Callable[[LLM, int], None]] = {
    "grammars": new_grammars,
    "prefix_pages": new_prefixes,
}


def test_every_cache_of_the_engine_is_filled_here(llm: LLM) -> None:
    assert set(llm.stats.caches) == FILL.keys()


@pytest.mark.parametrize("name", FILL)
def test_ten_times_its_bound_stays_within_it(
    llm: LLM, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_queue, "MAX_GRAMMARS", 4)
    bound = llm.stats.caches[name].max_entries
    FILL[name](llm, 10 * bound)
    held = llm.stats.caches[name]
    assert bound - 2 <= held.entries <= held.max_entries == bound  # full, and no more
    assert held.bytes <= held.max_bytes
    assert llm.stats.num_used_pages == 0


def test_the_bytes_of_grammars_are_bounded_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_queue.CompileJob, "size", 1 << 20)
    monkeypatch.setattr(compile_queue, "MAX_GRAMMAR_BYTES", 3 << 20)
    new_grammars(llm, 10)
    held = llm.stats.caches["grammars"]
    assert (held.entries, held.bytes, held.max_bytes) == (3, 3 << 20, 3 << 20)


def test_metrics_tell_what_caches_hold() -> None:
    stats = EngineStats(caches={"grammars": CacheStats(3, 256, 1000, 5000)})
    page = Metrics("m").exposition(stats)[0].decode()
    for name, value in {"entries": 3, "entries_max": 256, "bytes": 1000, "bytes_max": 5000}.items():
        assert f'treadle_cache_{name}{{cache="grammars",model_name="m"}} {value}.0' in page
    assert 'treadle_process_resident_bytes{process="api"}' in page


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_processes_are_told_apart() -> None:
    code = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", f"'from treadle.engine.process import main'; {code}"]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        others = resident_bytes()  # what tests before this one have left
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        sizes = resident_bytes()
        alone = resident_bytes(children[0].pid)
    finally:
        for child in children:
            child.communicate()
    assert sizes["engine"] > alone["api"] > 1_000_000
    assert sizes["api"] > 1_000_000 and ("templates" in sizes) == ("templates" in others)


def test_an_operator_may_choose_the_bounds_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIBRARY_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    set_library_environment()
    found = {name: os.environ[name] for name in LIBRARY_ENVIRONMENT}
    assert found == {**LIBRARY_ENVIRONMENT, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7"}


PRODUCTS = """
import json, sys
from treadle.config import set_library_environment
set_library_environment()
import torch
torch.set_num_threads(1)
from treadle_server.child_processes import resident_bytes
weight = torch.zeros(64, 64, dtype=torch.bfloat16)
sizes = []
for rows in range(1, 901):
    torch.nn.functional.linear(torch.zeros(rows, 64, dtype=torch.bfloat16), weight)
    if rows % 300 == 0:
        sizes.append(resident_bytes()["api"])
print(json.dumps(sizes))
"""


@pytest.mark.slow
def test_products_of_new_shapes_do_not_grow_the_process() -> None:
    result = subprocess.run([sys.executable, "-c", PRODUCTS], capture_output=True, check=True)
    _, first, last = json.loads(result.stdout)
    assert last - first < 30e6  # the libraries' own bounds would let it grow by hundreds of MB


def decorators(source: str) -> Iterator[tuple[str, str]]:
    """The functions whose results are kept without a bound, and the decorator."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or not node.args.args:
            continue
        for decorator in node.decorator_list:
            text = ast.unparse(decorator)
            if text.removeprefix("functools.") in (
                "cache",
                "lru_cache(None)",
                "lru_cache(maxsize=None)",
            ):
                yield node.name, text


def test_no_function_keeps_results_without_a_bound() -> None:
    found = {}
    for folder in ("core", "server", "cli", "kits", "plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            if "testing" not in path.parts and "training" not in path.parts:
                for name, _ in decorators(path.read_text()):
                    found[name] = str(path.relative_to(ROOT))
    assert found.keys() == CLOSED.keys(), sorted(found.items() ^ CLOSED.items())
