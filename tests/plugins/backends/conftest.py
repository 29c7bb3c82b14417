"""What tests of attention backends share: a bid in a process of its own, a captured step, an engine."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weft import LLM, SamplingParams
from weft.api.attention import AttentionBackend, AttentionRequest
from weft.testing.attention import Case

LENGTHS = ([900, 5, 64], [1, 400, 333], [12, 12, 895])


@pytest.fixture
def imported_by_bid() -> Callable[[str, AttentionRequest], set[str]]:
    """The modules of a new process in which a package has bid for a request."""

    def imported(package: str, request: AttentionRequest) -> set[str]:
        code = f"""if True:
            import sys
            from {package} import weft_attention
            from weft.api.types import AttentionRequest, DeviceInfo, MaskKind
            weft_attention({request!r}, dict())
            print(*sys.modules)
        """
        code = code.replace("<MaskKind.CAUSAL: 'causal'>", "MaskKind.CAUSAL")
        command = [sys.executable, "-c", code]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return set(found.split())

    return imported


@pytest.fixture
def replayed() -> Callable[[AttentionBackend, AttentionRequest], None]:
    """Captures a decode step as the runner does, the plan inside, and checks it at other lengths:
    three rows, a number that is padded. On CUDA only."""

    def check(backend: AttentionBackend, request: AttentionRequest) -> None:
        static = Case(request, [1] * 3, LENGTHS[0], 64, device="cuda")
        cache, q, k, v = static.cache(backend), static.q, static.k, static.v

        def step() -> torch.Tensor:
            return backend.forward(q, k, v, cache, backend.plan(static.batch))

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are compiled before the capture
            step()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for seed, lengths in enumerate(LENGTHS):
            case = Case(request, [1] * 3, lengths, 64, device="cuda", seed=seed)
            for old, new in ((q, case.q), (k, case.k), (v, case.v)):
                old.copy_(new)
            before, table = case.cache(backend), case.batch.page_table
            cache[:, : before.shape[1]] = before
            static.batch.kv_lens.copy_(case.batch.kv_lens)
            static.batch.slot_mapping.copy_(case.batch.slot_mapping)
            static.batch.page_table.zero_()
            static.batch.page_table[:, : table.shape[1]] = table
            graph.replay()
            case.check(out, str(lengths))

    return check


@pytest.fixture
def answers() -> Callable[..., list[str]]:
    """What the demo model says when an engine is pinned to a backend, with further options."""

    def ask(backend: str, **options: Any) -> list[str]:
        asked = ("Hello!", "What is weft?", "Which attention backends are there?")
        chats = [[{"role": "user", "content": text}] for text in asked]
        with LLM(
            model="demo:weft-demo",
            attention_backend=backend,
            max_num_seqs=4,
            page_size=64,
            num_pages=64,
            **options,
        ) as llm:
            outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=40))
        return [output.outputs[0].text for output in outputs]

    return ask
