"""What building a model may take: tensors are counted before their memory is taken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from treadle.errors import CheckpointError
from treadle_worker_kit.budget import FACTORIES, SPARE_BYTES, MemoryBudget

CPU = torch.device("cpu")
CALLS: dict[str, Callable[[int], Tensor]] = {
    "empty": torch.empty,
    "empty_strided": lambda n: torch.empty_strided((n,), (1,)),
    "zeros": torch.zeros,
    "ones": lambda n: torch.ones(n, dtype=torch.float16),
    "full": lambda n: torch.full((n,), 1.0),
    "rand": lambda n: torch.rand(n, requires_grad=True),
    "randn": lambda n: torch.randn(n),
    "randn of a shape": lambda n: torch.randn((n, 1), device="cpu"),
    "randn of a size": lambda n: torch.randn(size=(n,)),
    "randint": lambda n: torch.randint(5, (n,)),
    "randint of a size": lambda n: torch.randint(low=0, high=5, size=(n,)),
    "arange": lambda n: torch.arange(n),
    "arange by steps": lambda n: torch.arange(0, 2 * n, 2, dtype=torch.int32),
    "arange down": lambda n: torch.arange(start=n, end=0, step=-1),
    "eye": lambda n: torch.eye(n, 1),
    "eye of a square": lambda n: torch.eye(n),
    "linspace": lambda n: torch.linspace(0, 1, steps=n),
    "new_empty": lambda n: torch.empty(1).new_empty(n),
    "new_zeros": lambda n: torch.empty(1).new_zeros((n,)),
    "new_ones": lambda n: torch.empty(1).new_ones(n),
    "new_full": lambda n: torch.empty(1).new_full((n,), 2),
    "empty_like": lambda n: torch.empty_like(torch.empty(n)),
    "zeros_like": lambda n: torch.zeros_like(torch.empty(n)),
    "ones_like": lambda n: torch.ones_like(torch.empty(n)),
}


class Files:
    """A checkpoint of one file of no bytes."""

    def __init__(self, root: Path) -> None:
        self.root, self.names = root, ["model.safetensors"]
        (root / "model.safetensors").write_bytes(b"x")


@pytest.mark.parametrize("name", CALLS)
def test_each_factory_is_counted(name: str, tmp_path: Path) -> None:
    call = CALLS[name]
    with MemoryBudget(Files(tmp_path), CPU):
        assert len(call(3)) == 3
        for count in (SPARE_BYTES, 2**62):
            with pytest.raises(CheckpointError, match=r"needs more than .* bytes|cannot be built"):
                call(count)


def test_all_factories_are_tried() -> None:
    assert {f.__name__ for f in FACTORIES} == {name.split(" of ")[0].split()[0] for name in CALLS}


def test_wrong_arguments_are_torch_s_to_refuse(tmp_path: Path) -> None:
    with MemoryBudget(Files(tmp_path), CPU):
        for wrong in (
            lambda: torch.arange(0, 5, 0),
            lambda: torch.linspace(0, 1, steps=-1),
            lambda: torch.eye("3"),  # type: ignore[arg-type]
        ):
            with pytest.raises((TypeError, RuntimeError, CheckpointError)):
                wrong()


@pytest.mark.own_python
def test_counting_does_not_import_sympy(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from tests.kits.test_worker_budget import CALLS, CPU, Files, MemoryBudget\n"
        "with MemoryBudget(Files(pathlib.Path(sys.argv[1])), CPU):\n"
        "    for call in CALLS.values(): call(3)\n"
        "assert 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
