"""Weight files as far as their names and headers tell: size, parameters, dtype, what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from treadle.api.checkpoints import read_json
from treadle.errors import CheckpointError
from treadle_weights_kit.headers import read_header

__all__ = ("Weights", "read_weights")

PICKLES = (".bin", ".pt", ".pth")
FORMATS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
# Files beside the weights of a model: a second copy in another layout, or a training's state.
BESIDE = ("consolidated", "training_args", "optimizer", "scheduler", "adapter_model", "rng_state")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Weights:
    bytes: int
    parameters: int | None
    dtype: str | None
    """That of most parameters, if it is a floating-point type."""
    problems: list[str]


def read_weights(root: Path) -> Weights:
    """Look at the weight files of a folder; those of the first format that is there."""
    files: list[Path] = []
    for pattern in FORMATS:
        files = [path for path in sorted(root.glob(pattern)) if _is_model_weight(path)]
        if files:
            break
    problems = _missing_files(root, {path.name for path in files})
    if not files:
        return Weights(0, None, None, problems or ["it has no weight files"])
    size = sum(path.stat().st_size for path in files if path.exists())
    if files[0].suffix != ".safetensors":
        if files[0].suffix in PICKLES:
            problems.append(f"{files[0].name} is read only with --load-format pt")
        return Weights(size, None, None, problems)
    counts: Counter[str] = Counter()
    for path in files:
        try:
            for tensor in read_header(root, path.name).values():
                counts[tensor.dtype] += tensor.num_elements
        except CheckpointError:
            problems.append(f"{path.name} is damaged")
    main_dtype = max(counts, key=lambda kind: counts[kind], default="")
    total = None if problems else counts.total()
    return Weights(size, total, DTYPES.get(main_dtype), problems)


def _is_model_weight(path: Path) -> bool:
    return not path.name.startswith((".", *BESIDE))


def _missing_files(root: Path, file_names: Iterable[str]) -> list[str]:
    """What an index names and the folder lacks: a download that did not end."""
    for index in sorted(root.glob("*.index.json")):
        try:
            listed = set(read_json(root, index.name)["weight_map"].values())
        except (CheckpointError, KeyError, TypeError, AttributeError):
            return [f"{index.name} cannot be read"]
        # An index of a format that was not downloaded at all says nothing.
        if listed & set(file_names) and (absent := sorted(listed - set(file_names))):
            return [f"{len(absent)} of {len(listed)} weight files are missing ({absent[0]} ...)"]
    return []
