"""What tests of backends share: an offer in a separate process, a captured step, an engine, and kernels in Gluon
compiled for Hopper."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle import LLM, SamplingParams
from treadle.api.attention import AttentionBackend, AttentionRequest
from treadle.testing.attention import AttentionCase

LENGTHS = ([900, 5, 64], [1, 400, 333], [12, 12, 895])


@pytest.fixture
def imported_by_bid() -> Callable[[str, AttentionRequest], set[str]]:
    """The modules of a new process in which a package has answered a request."""

    def imported(package: str, request: AttentionRequest) -> set[str]:
        code = f"""if True:
            import sys
            from {package} import treadle_attention_backend
            from treadle.api.types import AttentionRequest, DeviceInfo, MaskKind
            treadle_attention_backend({request!r}, dict())
            print(*sys.modules)
        """
        code = code.replace("<MaskKind.CAUSAL: 'causal'>", "MaskKind.CAUSAL")
        command = [sys.executable, "-c", code]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return set(output.split())

    return imported


@pytest.fixture
def replayed() -> Callable[[AttentionBackend, AttentionRequest], None]:
    """Captures a decode step as the runner does, the plan inside, and checks it at other lengths:
    three rows, a number that is padded. On CUDA only."""

    def check(backend: AttentionBackend, request: AttentionRequest) -> None:
        static = AttentionCase(request, [1] * 3, LENGTHS[0], 64, device="cuda")
        cache, q, k, v = static.cache(backend), static.q, static.k, static.v

        def step() -> torch.Tensor:
            return backend.forward(q, k, v, cache, backend.build_metadata(static.batch))

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are compiled before the capture
            step()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for seed, lengths in enumerate(LENGTHS):
            case = AttentionCase(request, [1] * 3, lengths, 64, device="cuda", seed=seed)
            for old, new in ((q, case.q), (k, case.k), (v, case.v)):
                old.copy_(new)
            before, table = case.cache(backend), case.batch.page_table
            cache[:, : before.shape[1]] = before
            static.batch.seq_lens.copy_(case.batch.seq_lens)
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
        questions = ("Hello!", "What is treadle?", "Which attention backends are there?")
        chats = [[{"role": "user", "content": text}] for text in questions]
        with LLM(
            model="demo:treadle-demo",
            attention_backend=backend,
            max_num_seqs=4,
            page_size=64,
            num_pages=64,
            **options,
        ) as llm:
            outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=40))
        return [output.outputs[0].text for output in outputs]

    return ask


@pytest.fixture
def on_hopper() -> None:
    """For tests that run kernels of Hopper's."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


@pytest.fixture
def fails() -> Callable[..., bool]:
    """A trial of a kernel on a device whose compiler is missing."""

    def trial(*_: Any) -> bool:
        raise OSError("no compiler")

    return trial


@pytest.fixture
def off() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """How far one tensor is from another, of whose size. Not a number where one of ``got`` is not, so
    that no comparison holds."""
    return lambda got, want: float((got.float() - want.float()).norm() / want.float().norm())


@pytest.fixture
def for_hopper(tmp_path: Path) -> Callable[..., str]:
    """The PTX of a kernel in Gluon, compiled for Hopper without a GPU.

    It must fit into shared memory, spill no registers beyond ``spills`` bytes, and its products must not
    wait for each other.
    Arguments that are not in ``constants`` or ``types`` are ``i32``; ``aligned`` ones are multiples of 16.
    """
    triton = pytest.importorskip("triton")
    pytest.importorskip("triton.experimental.gluon")
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    def compiled(
        kernel: Any,
        constants: dict[str, Any],
        types: dict[str, str],
        aligned: tuple[str, ...] = (),
        spills: int = 0,
        **options: int,
    ) -> str:
        names = kernel.arg_names
        source = GluonASTSource(
            kernel,
            {n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
            {(names.index(n),): value for n, value in constants.items()},
            {(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
        )
        compiled_kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert compiled_kernel.metadata.shared <= 227 * 1024
        code = tmp_path / "kernel.ptx"
        code.write_text(compiled_kernel.asm["ptx"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        command = [tool, "-v", "--gpu-name=sm_90a", code, "-o", tmp_path / "kernel.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", log)]
        assert spilled and max(spilled) <= spills
        assert "serializ" not in log, "products wait for each other"
        ptx: str = compiled_kernel.asm["ptx"]
        return ptx

    return compiled
