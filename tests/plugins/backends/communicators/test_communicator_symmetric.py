"""Sums and gathers over symmetric memory: what is supported, and that nothing breaks without it; on several
cards, their results."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from treadle_communicator_symmetric import all_reduce as all_reduce_module
from treadle_communicator_symmetric import communicator as module
from treadle_communicator_symmetric import treadle_communicator
from treadle_communicator_symmetric.all_reduce import (
    BLOCK_BYTES,
    CustomAllReduce,
    max_custom_bytes,
)
from treadle_communicator_symmetric.communicator import SymmetricCommunicator, create
from treadle_communicator_symmetric.fused import (
    AllGatherLogits,
    AllReduceRMSNorm,
    DryRun,
    norm_memory,
)
from treadle_communicator_symmetric.memory import SymmetricBuffer, allocate_symmetric

from treadle.api.communicators import Communicator, CommunicatorRequest
from treadle.api.devices import device_info
from treadle.api.models import ModelContext
from treadle.api.types import CommunicatorOffer, DeviceInfo, Refusal
from treadle.plugins import PluginManager
from treadle.testing.ranks import run_on_ranks
from treadle_layers_kit import LMHead, RMSNorm
from treadle_worker_kit.communicator import TorchCommunicator, choose_communicator
from treadle_worker_kit.fusion import apply_fusions, kernel_finder

CPU = torch.device("cpu")


def test_it_is_for_several_cuda_devices() -> None:
    def offer_or_refusal(kind: str, world_size: int) -> object:
        return treadle_communicator(CommunicatorRequest(DeviceInfo(kind), world_size))

    assert isinstance(offer_or_refusal("cuda", 2), CommunicatorOffer)
    for refusal, reason in (
        (offer_or_refusal("cpu", 2), "this is cpu"),
        (offer_or_refusal("cuda", 1), "only one rank"),
    ):
        assert isinstance(refusal, Refusal) and reason in refusal.reasons[0]


def test_what_a_sum_supports() -> None:
    limit = 1 << 18
    custom = CustomAllReduce(torch.clone, limit, "none")
    full = torch.empty(4, limit // 8, dtype=torch.bfloat16)
    for supported in (full, full[1:3], full.float()[:2]):
        assert custom.supports(supported)
    for unsupported in (
        torch.empty(limit // 2 + 8, dtype=torch.bfloat16),  # too large
        full.half(),  # no such kernel
        full[:, :8],  # not contiguous
        full.view(-1)[:7],  # not a multiple of 16 bytes
        full.view(-1)[1:9],  # not aligned
        full[:0],
    ):
        assert not custom.supports(unsupported), unsupported.shape


def buffer(num_programs: int = 1) -> SymmetricBuffer:
    return SymmetricBuffer(torch.zeros(2), torch.zeros(num_programs), 0, 8 << 20)


def test_what_fused_operations_support() -> None:
    def kernel(*args: Any, compile_only: bool) -> Any:
        assert not compile_only
        return args[:2] if len(args) > 5 else args[0]

    arguments = (None, 1e-5, 0.0)
    norm: Any = AllReduceRMSNorm(kernel, buffer(), 32, torch.float32, 6 * 32 * 4 + 5, DryRun())
    x = torch.ones(6, 32)
    assert norm.run(x, x.clone(), *arguments) is not None
    for pair in (
        (torch.ones(7, 32), torch.ones(7, 32)),  # too large
        (x[::2], x[::2].clone()),  # not contiguous
        (x[::2].clone(), x[::2]),
        (x.half(), x.half()),
        (x, x[:2]),
        (x[:0], x[:0]),
        (x[:, :16].clone(), x[:, :16].clone()),  # not of this size
    ):
        assert norm.run(*pair, *arguments) is None
    wide = torch.ones(4, 64)
    gather = AllGatherLogits(kernel, buffer(), 64, torch.float32, DryRun())
    assert gather.run(wide) is not None and gather.run(torch.ones(4, 80)[:, :64]) is not None
    for logits in wide.half(), wide[:0], wide[0], wide[:, :32], wide.t().contiguous().t():
        assert gather.run(logits) is None


def test_a_dry_run_only_compiles() -> None:
    """What is returned has the shape of the result, and nothing that later kernels could choke on."""
    compiled: list[int] = []

    def kernel(x: Tensor, *args: Any, compile_only: bool) -> Any:
        assert compile_only
        compiled.append(len(x))
        unset = torch.full((len(x), 64 if len(args) == 4 else 32), torch.nan)
        return unset if len(args) == 4 else (unset, args[0])

    rest = (None, 1e-5, 0.0)
    norm: Any = AllReduceRMSNorm(kernel, buffer(), 32, torch.float32, 6 * 32 * 4, DryRun(True))
    y, total = norm.run(torch.ones(6, 32), torch.ones(6, 32), *rest)
    assert y.shape == total.shape == (6, 32) and y.isfinite().all()
    assert norm.run(torch.ones(7, 32), torch.ones(7, 32), *rest) is None, "not supported either way"
    gather = AllGatherLogits(kernel, buffer(), 32, torch.float32, DryRun(True))
    logits = gather.run(torch.ones(4, 32))
    assert logits is not None and logits.shape == (4, 64) and logits.isfinite().all()
    assert compiled == [6, 4]


def test_a_norms_programs_have_a_row_each() -> None:
    assert norm_memory(32, torch.float32, 6 * 32 * 4 + 5) == (6 * 32 * 4, 6)
    assert norm_memory(4096, torch.bfloat16, 1 << 40) == (4 << 20, 512)
    assert norm_memory(5120, torch.bfloat16, 1 << 40) == (4 << 20, 256), "the power of two"
    assert norm_memory(4096, torch.bfloat16, 4096) is None, "no row fits"
    assert norm_memory(4095, torch.bfloat16, 1 << 40) is None, "not aligned"
    assert norm_memory(4096, torch.float64, 1 << 40) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a torch without CUDA")
def test_a_set_up_that_fails_leaves_nccl(caplog: pytest.LogCaptureFixture) -> None:
    """On all ranks, with a reason in the log."""

    def run(base: Communicator) -> bool:
        offers: Any = SimpleNamespace(
            best_offer=lambda kind, request: CommunicatorOffer("symmetric", 80, create)
        )
        return choose_communicator(offers, base, CPU) is base

    with caplog.at_level(logging.INFO, "treadle.workers"):
        assert run_on_ranks(2, run) == [True, True]
    assert len(caplog.records) == 2
    assert all("communicator symmetric is not used" in r.getMessage() for r in caplog.records)


def reasons(run: Callable[[Communicator], object]) -> list[str]:
    """Why each of two ranks could not create it."""

    def caught(base: Communicator) -> str:
        with pytest.raises(RuntimeError) as exc_info:
            run(base)
        return str(exc_info.value)

    return run_on_ranks(2, caught)


def test_all_ranks_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank fails to set up: the others must not sum alone."""

    def set_up(self: SymmetricCommunicator, max_bytes: int) -> None:
        if self.rank == 1:
            raise RuntimeError("no peer access")

    monkeypatch.setattr(module, "_unsupported_reason", lambda: None)
    monkeypatch.setattr(module, "_kernels", lambda device: {})
    monkeypatch.setattr(module.dist, "group", SimpleNamespace(WORLD=None))
    monkeypatch.setattr(SymmetricCommunicator, "set_up", set_up)
    assert reasons(lambda base: create(base, CPU)) == [
        "another rank cannot share its memory",
        "RuntimeError: no peer access",
    ]


def test_ranks_of_several_hosts_use_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(("one", "two"))
    monkeypatch.setattr(module, "_unsupported_reason", lambda: None)
    monkeypatch.setattr(module, "_kernels", lambda device: {})
    monkeypatch.setattr(module.socket, "gethostname", lambda: next(names))
    assert all("several hosts" in reason for reason in reasons(lambda base: create(base, CPU)))


def test_memory_is_allocated_on_all_ranks_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has no memory left, or cannot reach the others: none may wait for it."""
    import torch.distributed._symmetric_memory as symmetric

    failing: list[str] = []
    sizes: list[int] = []

    def fail(name: str) -> None:
        if name in failing:
            failing.remove(name)  # one rank, whichever comes first
            raise RuntimeError(name)

    def empty(size: int, **options: Any) -> torch.Tensor:
        fail("empty")
        sizes.append(size)
        return torch.ones(size, **options)

    def rendezvous(buffer: torch.Tensor, group: str) -> Any:
        fail("rendezvous")
        return SimpleNamespace(buffer_ptrs=[16, 32], rank=0)

    def allocate(base: Communicator) -> SymmetricBuffer | None:
        return allocate_symmetric(base, CPU, SimpleNamespace(group_name="all"), 64, 3)

    monkeypatch.setattr(symmetric, "empty", empty)
    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for fault in "empty", "rendezvous":
        failing.append(fault)
        assert run_on_ranks(2, allocate) == [None] * 2
        assert not failing
    for allocated in run_on_ranks(2, allocate):
        assert allocated is not None and allocated.max_bytes == 64
        assert allocated.buffer_ptrs.tolist() == [16, 32]
        assert allocated.buffer_indices.tolist() == [0] * 3
        assert allocated.buffer_indices.dtype == torch.int32
        memory, _ = allocated.keepalive  # type: ignore[misc]
        assert not memory.any()
    assert set(sizes) == {3 * 2 * 64}


@pytest.mark.parametrize("size", [2, 4])
def test_a_kernel_sums_any_size_between_two(
    size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_unsupported_reason", lambda: None)
    monkeypatch.setattr(module.dist, "group", SimpleNamespace(WORLD=None))
    monkeypatch.setattr(module, "max_custom_bytes", lambda world_size: 4 * BLOCK_BYTES)
    sizes: list[int] = []
    compiled: list[tuple[int, int]] = []

    def kernels(device: torch.device) -> dict[str, Callable[..., Any]]:
        def kernel(
            x: Tensor, ptrs: Tensor, indices: Tensor, rank: int, *, compile_only: bool = False
        ) -> Tensor:
            assert len(indices) == 4, "a program has a block"
            if compile_only:
                compiled.append((rank, x.nbytes))
                return x
            assert len({rank for rank, size in compiled if size == x.nbytes}) == size
            sizes.append(x.nbytes)
            return bases[rank].all_reduce(x)

        return {"all_reduce": kernel}

    def allocate(
        base: Communicator, device: torch.device, group: Any, max_bytes: int, programs: int
    ) -> SymmetricBuffer:
        return SymmetricBuffer(torch.zeros(size), torch.zeros(programs), base.rank, max_bytes)

    bases: dict[int, Communicator] = {}
    monkeypatch.setattr(module, "_kernels", kernels)
    monkeypatch.setattr(module, "allocate_symmetric", allocate)

    def run(base: Communicator) -> SymmetricCommunicator:
        bases[base.rank] = base
        return create(base, CPU)

    with caplog.at_level(logging.INFO, "treadle.communicator_symmetric"):
        communicators = run_on_ranks(size, run)
    assert (max(sizes) > 4 * BLOCK_BYTES) == (size == 2), "what is used has been tried"
    for communicator in communicators:
        custom = communicator.custom
        large = torch.zeros(64, BLOCK_BYTES)
        assert custom is not None and custom.supports(large[:1])
        assert custom.supports(large) == (size == 2)
        assert communicator.memory_bytes == 3 * size * 4 * BLOCK_BYTES
        compiled.clear()
        communicator.set_dry_run(True)
        for x in (large[:1], large.half()):  # by the kernel, and by the base
            assert torch.equal(communicator.all_reduce(x), x), "a rank alone waits for nobody"
        assert compiled == [(communicator.rank, large[:1].nbytes)]
    beyond = "" if size == 2 else " up to 16 KiB, NCCL beyond"
    assert [r.getMessage() for r in caplog.records] == [f"all-reduce: a Triton kernel{beyond}"]


def test_nobody_sums_before_all_have_compiled() -> None:
    """A rank that cannot would be waited for, on the device, by those that can."""

    def run(base: Communicator) -> object:
        def compile_for(x: Tensor) -> None:
            if base.rank == 1:
                raise OSError("no compiler")

        unused = CustomAllReduce(lambda x: pytest.fail("it runs"), 1 << 20, "none", compile_for)
        return all_reduce_module.self_check(unused, base, CPU, 4 * BLOCK_BYTES)

    assert reasons(run) == ["another rank cannot compile the kernel", "OSError: no compiler"]


def test_torchs_kernel_is_set_up_on_all_ranks_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks agree as often on either one, and the next agreement is about the same thing."""
    failing = ["no symmetric memory"]

    def torch_all_reduce(device: torch.device, group: Any, max_bytes: int) -> CustomAllReduce:
        if failing:  # whichever rank comes first
            raise OSError(failing.pop())
        return CustomAllReduce(torch.clone, max_bytes, "none")

    def run(base: Communicator) -> tuple[str, list[int]]:
        with pytest.raises(RuntimeError) as caught:
            create(base, CPU, triton=False)
        return str(caught.value), base.all_reduce_min([7 + base.rank])

    monkeypatch.setattr(module, "_unsupported_reason", lambda: None)
    monkeypatch.setattr(module, "torch_all_reduce", torch_all_reduce)
    monkeypatch.setattr(module.dist, "group", SimpleNamespace(WORLD=None))
    results = run_on_ranks(2, run)
    assert sorted(reason for reason, _ in results) == [
        "RuntimeError: OSError: no symmetric memory",
        "RuntimeError: another rank cannot share its memory",
    ]
    assert [least for _, least in results] == [[7], [7]]


def test_a_wrong_sum_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_sum = CustomAllReduce(lambda x: x, 1 << 20, "none")

    def run(base: Communicator) -> object:
        return all_reduce_module.self_check(broken_sum, base, CPU, 4 * BLOCK_BYTES)

    assert all("over 2 ranks is wrong" in reason for reason in reasons(run))


def test_the_limit_falls_with_the_cube_of_the_ranks() -> None:
    assert [max_custom_bytes(n) for n in (2, 4, 8)] == [4 << 20, 512 << 10, 64 << 10]
    assert all(max_custom_bytes(n) % BLOCK_BYTES == 0 and max_custom_bytes(n) for n in range(2, 17))


# ------------------------------------------------------------------------------- several cards


def work(rank: int, size: int, meeting: str, results: Any, triton: bool) -> None:
    """One rank: sums of several sizes and types, then a captured one with other numbers."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    base = TorchCommunicator(rank, size, device, FileStore(meeting, size))
    ranks = create(base, device, triton=triton)
    failures: list[str] = []
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for rows in (1, 3, 32, 4096):
            # Whole numbers, so that the order of the sum does not matter.
            parts = [
                torch.randint(-16, 17, (rows, 1024), generator=torch.Generator().manual_seed(r))
                for r in range(size)
            ]
            actual = ranks.all_reduce(parts[rank].to(device, dtype))
            if not torch.equal(actual.cpu(), sum(parts[1:], parts[0]).to(dtype)):
                failures.append(f"{dtype} {rows}")
    total = size * (size - 1) // 2
    x = torch.zeros(8, 1024, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        ranks.all_reduce(x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(2):
            y = ranks.all_reduce(y.clone())
    for step in range(20):
        x.fill_((step % 5) + rank)
        graph.replay()
        if not bool((y == size * (size * (step % 5) + total)).all()):
            failures.append(f"replay {step}")
    for count in (2040, 8, 262144, 4096, 8, 1 << 20) * 40:  # chunks take turns of their own
        x = torch.full((count,), rank + 1.0, dtype=torch.bfloat16, device=device)
        y = ranks.all_reduce(x)
        if not bool((y == total + size).all()):
            failures.append(f"{count} in a row of sums")
    if triton:
        failures += fused(ranks, device)
    results.put((rank, ranks.custom.name if ranks.custom else None, failures))
    torch.cuda.synchronize()
    base.close()


def fused(ranks: SymmetricCommunicator, device: torch.device) -> list[str]:
    """What norms that sum and a gather get wrong, called and captured, some turns of several sizes."""
    kind = torch.bfloat16
    context = ModelContext(
        hf_config=None,
        dtype=kind,
        device=device,
        tp_group=ranks,
        quantization=None,
        register_attention=lambda request, spec: pytest.fail("there is no attention here"),
    )
    with device:
        norm, head = RMSNorm(context, 4096, 1e-6), LMHead(context, "head", 64, 151936)
    norm.tp_group = ranks
    norm.weight.data.uniform_(0.5, 2)
    model = torch.nn.ModuleList([norm, head])
    served = apply_fusions(
        model, kernel_finder(PluginManager()), device_info(device), "bfloat16"
    ).backends
    limit = ranks.custom.max_bytes if ranks.custom else 0
    sum_op, gather_op = norm.all_reduce_op, head.gather_op
    if sum_op is None or gather_op is None:
        return [f"only {served} are served"]

    def summed(x: Tensor) -> list[Tensor]:
        y, total = norm(x.clone(), x.clone())
        return list(norm(y, total))

    def gathered(x: Tensor) -> list[Tensor]:
        return [
            head.gather_op(part) if head.gather_op else ranks.all_gather(part) for part in (x, -x)
        ]

    torch.manual_seed(ranks.rank)
    failures = []
    for run, width in (summed, 4096), (gathered, head.out_features):
        for rows in (1, 3, 226, 1500, 3):
            if run is summed and rows * width * kind.itemsize > limit:
                continue
            x = torch.randn(rows, width, dtype=kind, device=device).relu_()  # zeros count, too
            run(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = run(x)
            for turn in range(5):
                x.normal_().relu_()
                norm.all_reduce_op = head.gather_op = None
                expected = run(x)
                norm.all_reduce_op, head.gather_op = sum_op, gather_op
                graph.replay()
                slack = 2**-7 * (run is summed)  # the order of a norm's sum is free
                for mode, outputs in ("captured", captured), ("called", run(x)):
                    if not all(
                        torch.allclose(y, reference, slack, slack)
                        for y, reference in zip(outputs, expected, strict=True)
                    ):
                        failures.append(f"{run.__name__} of {rows}, {mode}, turn {turn}")
    return failures


@pytest.mark.gpu
@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_cards_sum_alike_in_and_out_of_graphs(tmp_path: Path, size: int, triton: bool) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    workers = [
        spawn.Process(target=work, args=(rank, size, str(tmp_path / "meeting"), results, triton))
        for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    reports = sorted(results.get(timeout=180) for _ in workers)
    for worker in workers:
        worker.join(60)
    name = "a Triton kernel" if triton else "torch's kernel"
    assert reports == [(rank, name, []) for rank in range(size)]
