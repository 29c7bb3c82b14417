"""The kernels between ranks: three processes in Triton's interpreter, and their code for Hopper."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.early

SHARING = """
    import multiprocessing
    import torch
    import torch.multiprocessing
    from treadle_communicator_symmetric.gather import all_gather
    from treadle_layers_kit import ops
    from treadle_communicator_symmetric.reduce import all_reduce, all_reduce_add_rms_norm

    def shared(limit, units):
        memory = [3 * RANKS * limit] * RANKS
        return [torch.zeros(size, dtype=torch.uint8).share_memory_() for size in memory], units

    def mine(memory):
        buffer_ptrs, units = memory
        return torch.tensor([p.data_ptr() for p in buffer_ptrs]), torch.zeros(units, dtype=torch.int32)

    def drawn(seed, *shape):
        seeds = [torch.Generator().manual_seed(100 * seed + r) for r in range(RANKS)]
        parts = [torch.randn(*shape, generator=seed) for seed in seeds]
        for part in parts:  # zeros must arrive, too
            part[part > 1] = 0.0
            part[part < -1] = -0.0
        parts[seed % RANKS].zero_()
        return parts

    def counted(*memories):
        for _, buffer_indices in memories:
            if not 0 <= int(buffer_indices.min()) <= int(buffer_indices.max()) <= 2:
                yield "a count that overflows some day"

    def start(rank, memories, results):
        try:
            results.put(list(work(rank, memories)))
        except BaseException as error:
            results.put([repr(error)])
            raise
"""
TOGETHER = """
    if __name__ == "__main__":
        fork = multiprocessing.get_context("fork")
        memories, results = MEMORIES(), fork.Queue()
        workers = [fork.Process(target=start, args=(r, memories, results)) for r in range(RANKS)]
        for worker in workers:
            worker.start()
        found = [results.get(timeout=90) for _ in workers]
        assert found == [[]] * RANKS, found
        for worker in workers:
            worker.join()
"""
RANKED = {
    "all_reduce": """
        RANKS, LIMIT = 3, 4 * 4096
        MEMORIES = lambda: shared(LIMIT, LIMIT // 4096)

        def work(rank, memory):
            memory = mine(memory)
            for turn in range(2):  # of five sizes each: every one of three buffers is used again
                for dtype, size in (
                    (torch.float32, 8), (torch.float16, 6144), (torch.float32, 4096),
                    (torch.float16, 20000), (torch.float32, 9000),
                ):
                    parts = [part.to(dtype) for part in drawn(turn, size)]
                    got = all_reduce(parts[rank], *memory, rank, use_pdl=False)
                    if not torch.equal(got, sum(part.float() for part in parts).to(dtype)):
                        yield turn, size
            yield from counted(memory)
    """,
    "all_reduce_add_rms_norm": """
        RANKS, ROWS = 3, 5
        KINDS = (torch.float32, 200), (torch.float16, 1000), (torch.float32, 64)
        SUMS = shared(1 << 15, 8)
        MEMORIES = lambda: [shared(ROWS * 1024 * kind.itemsize, ROWS) for kind, size in KINDS]

        def work(rank, memories):
            memories, summing = [mine(memory) for memory in memories], mine(SUMS)
            for turn, rows in enumerate((1, 5, 12, 6)):
                for (kind, size), memory in zip(KINDS, memories):
                    x = [part.to(kind) for part in drawn(turn, rows, size)]
                    same = drawn(50 + turn, rows, size)
                    weight, offset = same[1][0].to(kind), turn % 2 * 1.0
                    before, residual = same[0].to(kind), same[0].to(kind).clone()
                    total = all_reduce(x[rank], *summing, rank, use_pdl=False)
                    want, after = ops.fused_add_rms_norm(total, before, weight, 1e-5, offset)
                    got = all_reduce_add_rms_norm(
                        x[rank], residual, weight, 1e-5, offset, *memory, rank, use_pdl=False
                    )
                    slack = 1e-4 if kind == torch.float32 else 3e-3
                    close = torch.allclose(got[0], want, rtol=slack, atol=slack)
                    if not close or not torch.equal(got[1], after):
                        yield turn, rows, size
                    if got[1] is not residual:
                        yield "the residual is not replaced"
            yield from counted(*memories)
    """,
    "all_gather": """
        RANKS, ROWS, PROGRAMS = 3, 6, 4
        KINDS = (torch.float32, 72), (torch.float16, 5008), (torch.float32, 2048), (torch.float32, 2050)
        MEMORIES = lambda: [shared(PROGRAMS * 4096, PROGRAMS) for _ in KINDS]

        def work(rank, memories):
            memories = [mine(memory) for memory in memories]
            for turn, rows in enumerate((1, 6, 2, 5)):
                for (kind, n), memory in zip(KINDS, memories):
                    parts = [part.to(kind)[:, :n] for part in drawn(turn, rows, n + turn % 3)]
                    limit = PROGRAMS * 4096
                    got = all_gather(parts[rank], *memory, rank, limit, use_pdl=False)
                    if not torch.equal(got, torch.cat(parts, 1)):
                        yield turn, rows, n
            yield from counted(*memories)
    """,
}


@pytest.mark.parametrize(
    "name",
    # In the default selection the one whose kernel sums, exchanges and normalizes.
    [name if "norm" in name else pytest.param(name, marks=pytest.mark.slow) for name in RANKED],
)
def test_ranks_have_what_they_send_each_other(name: str, in_process: Callable[..., None]) -> None:
    """Three processes over memory that they share, in Triton's interpreter; ``work`` yields what is
    wrong."""
    pytest.importorskip("triton")
    in_process(SHARING, RANKED[name], TOGETHER, interpret=True)


ALONE = """
    RANKS = 2

    def compiles(kernel, *args):
        y = kernel(*args, rank=0, use_pdl=False, compile_only=True)
        assert not any(part.any() for part in memory[0]), "something was sent"
        return y

    memory = shared(4 * 4096, 4)
    places = dict(zip(("buffer_ptrs", "buffer_indices"), mine(memory)))
    x = torch.ones(4, 64)
    assert compiles(all_reduce, x, *places.values()).shape == x.shape
    y, residual = compiles(all_reduce_add_rms_norm, x, x, x[0], 1e-5, 0.0, *places.values())
    assert y.shape == x.shape and residual is x
    gathered = all_gather(x, *places.values(), 0, 4 * 4096, use_pdl=False, compile_only=True)
    assert gathered.shape == (4, 128) and not places["buffer_indices"].any()
"""


def test_what_is_only_compiled_waits_for_nobody(in_process: Callable[..., None]) -> None:
    pytest.importorskip("triton")
    in_process(SHARING, ALONE, interpret=True)


BUILDS = """
    import re
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from treadle_communicator_symmetric import gather, reduce

    def build(kernel, warps, constants, **types):
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else types.get(n, "*bf16") for n in names}
        values = {(names.index(n),): value for n, value in constants.items()}
        options = {"num_warps": warps, "launch_pdl": True}
        aligned = [n for n in names if signature[n][0] == "*" or n in ("elements_per_rank", "numel", "n", "x_stride")]
        aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned if n not in constants}
        source = ASTSource(kernel, signature, values, aligned)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= 227 << 10
        code = made.asm["ptx"]
        wait = code.index("griddepcontrol.wait")
        assert code.index("griddepcontrol.launch_dependents") < wait
        assert "st.global" not in code[:wait], "something is written before the results are awaited"
        if "buffer_ptrs" in names:
            assert code.count("ld.volatile.global.v4") > 1, "nobody looks again"
            assert ("atom.global.sys.acq_rel" in code) == constants["SEVERAL_ROUNDS"], "no order of turns"
            assert "global.b16" not in code, "too little moves at once"
            index = re.search("(st|atom)[.]global[.](sys[.]acq_rel[.]exch[.])?b32 ", code)
            assert "bar.sync" in code[wait : index.start()], "a late thread would load what is stored here"
        return code[:wait].count("ld.global")

    counted = dict(buffer_ptrs="*i64", buffer_indices="*i32", numel="i32", elements_per_rank="i32")
    for kind, turns in ("*bf16", False), ("*fp32", True):
        chosen = dict(rank=1, WORLD_SIZE=4, BLOCK_SIZE=2048, SEVERAL_ROUNDS=turns, USE_PDL=True)
        assert build(reduce.all_reduce_kernel, 4, chosen, x=kind, out=kind, **counted) == 0
        rows = dict(x=kind, residual=kind, weight=kind, out=kind, eps="fp32", offset="fp32", rows="i32")
        chosen |= dict(HIDDEN_SIZE=2048)
        assert build(reduce.sum_norm_kernel, 4, chosen, **rows, **counted) > 0, "no weight read early"
        chosen = dict(rank=0, WORLD_SIZE=2, BLOCK_SIZE=4096, SEVERAL_ROUNDS=turns, USE_PDL=True)
        rows = dict(x=kind, y=kind, rows="i32", n="i32", x_stride="i32")
        assert build(gather.gather_kernel, 4, chosen, **rows, **counted) == 0
"""


def test_kernels_compile_for_hopper_and_wait_before_they_write(
    in_process: Callable[..., None],
) -> None:
    """What starts early may read weights, and nothing else, until the kernel before has finished."""
    pytest.importorskip("triton")
    in_process(BUILDS, interpret=False)


LATE = """
    import torch
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_wait
    from treadle_communicator_symmetric import reduce

    @triton.jit
    def late_warps(USE_PDL: tl.constexpr):
        if USE_PDL:
            gdc_wait()
        else:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.ge.u32 p, t, 32;"
                " @p nanosleep.u32 50000; mov.u32 $0, $1; }",
                "=r,r,~{memory}", [USE_PDL + 0], dtype=tl.int32, is_pure=False, pack=1,
            )

    reduce.wait_for_previous_kernel = late_warps
    rows, hidden, programs = 4, 4096, 8
    size = 3 * 2 * programs * hidden * 2
    buffers = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    buffer_ptrs = torch.tensor([buffer.data_ptr() for buffer in buffers], device="cuda")
    indices = [torch.zeros(programs, dtype=torch.int32, device="cuda") for _ in range(2)]
    parts = [torch.randn(rows, hidden, device="cuda").bfloat16() for _ in range(2)]
    expected = (parts[0].float() + parts[1].float()).bfloat16()
    weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]

    def add(rank, compile_only=False):
        x, places = parts[rank], (buffer_ptrs, indices[rank], rank)
        options = dict(use_pdl=rank == 0, compile_only=compile_only)
        total = torch.zeros_like(x)
        reduce.all_reduce_add_rms_norm(x, total, weight, 1e-5, 0.0, *places, **options)
        return total, reduce.all_reduce(x, *places, **options)

    for rank in range(2):
        add(rank, compile_only=True)
    torch.cuda.synchronize()
    for turn in range(5):
        sums = []
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                sums += add(rank)
        torch.cuda.synchronize()
        assert all(torch.equal(total, expected) for total in sums), turn
"""


@pytest.mark.gpu
def test_threads_that_start_late_use_the_same_buffer(in_process: Callable[..., None]) -> None:
    """Two ranks on one device; most warps of one of them begin 50 us after its first."""
    in_process(LATE, interpret=False)
