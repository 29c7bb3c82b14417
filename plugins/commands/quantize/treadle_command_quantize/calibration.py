"""AWQ and GPTQ, which look at a model's activations: llm-compressor computes them, and this hands it texts.

The result is a checkpoint of ``compressed-tensors``. The error of a layer is that of its hidden states on the first
text: matrices alone would show nothing, because AWQ moves scales between them.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from treadle.api.checkpoints import SMALL, checked_path, matching
from treadle.api.files import ModelFiles
from treadle.errors import ConfigError, UnsupportedModelError
from treadle_command_quantize.conversion import STALE, Converted

__all__ = ("NUM_TEXTS", "TEXT_TOKENS", "Calibration", "calibrate", "read_texts")

NUM_TEXTS, TEXT_TOKENS = 256, 512
"""Texts that are looked at, and the tokens of each."""
EXTRA = "install ./plugins/commands/quantize[calibration] from a clone of the repository"
# Heads and routers stay in full, as every writer of such checkpoints leaves them.
IN_FULL = ("lm_head", r"re:.*\.(gate|router|shared_expert_gate)$")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Calibration:
    """``group`` inputs share a scale; ``ignore`` are names of modules to leave as they are."""

    method: Literal["awq", "gptq"]
    group: int = 128
    ignore: Sequence[str] = ()

    def recipe(self) -> Any:
        """Return the modifiers of llm-compressor."""
        weights = {
            "num_bits": 4,
            "type": "int",
            "strategy": "group",
            "group_size": self.group,
            "symmetric": self.method == "gptq",
        }
        ignore = [*IN_FULL, *(rf"re:(.*\.)?{name}$" for name in self.ignore)]
        values: dict[str, Any] = {
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ignore,
        }
        if self.method == "gptq":
            from llmcompressor.modifiers.quantization import GPTQModifier

            return GPTQModifier(**values)
        from llmcompressor.modifiers.quantization import QuantizationModifier
        from llmcompressor.modifiers.transform.awq import AWQModifier

        return [AWQModifier(), QuantizationModifier(**values)]


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file: one in each line of a ``.jsonl``, as ``text``, else the whole file.

    Raises ``ConfigError`` if there is none.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibration {path} cannot be read: {error}") from error
    if path.suffix != ".jsonl":
        texts = [content]
    else:
        texts = []
        for number, line in enumerate(content.splitlines(), 1):
            try:
                value = json.loads(line) if line.strip() else {"text": ""}
            except ValueError as error:
                raise ConfigError(f"--calibration {path}, line {number}: {error}") from error
            text = value.get("text") if isinstance(value, dict) else None
            if not isinstance(text, str):
                raise ConfigError(
                    f"--calibration {path}, line {number} is {line[:80]!r}; an object with text is needed"
                )
            texts.append(text)
    if not any(text.strip() for text in texts):
        raise ConfigError(
            f"--calibration {path} has no text; give a file of what the model will read"
        )
    return texts


def calibrate(
    files: ModelFiles,
    output: Path,
    calibration: Calibration,
    texts: Sequence[str],
    on_layer: Callable[[str, float], None] = lambda name, error: None,
) -> Converted:
    """Write ``output``, which appears when it is complete; ``on_layer`` gets the relative error of each layer.

    Raises ``ConfigError`` if llm-compressor is missing or the checkpoint is quantized already, and
    ``UnsupportedModelError`` with what llm-compressor says if it cannot do it.
    """
    if "quantization_config" in files.config or "compression_config" in files.config:
        raise ConfigError(
            f"{files.root} is quantized already; give the checkpoint that it was made from"
        )
    try:
        from llmcompressor import oneshot
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"--method {calibration.method} needs llm-compressor, and importing it says {error}: {EXTRA}"
        ) from error
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(files.root),
        "local_files_only": True,
    }
    tokenizer: Any = AutoTokenizer.from_pretrained(**where)
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype="auto")
    model.eval()
    batches = list(_batches(tokenizer, texts))
    before = _states(model, batches[0])
    old_bytes = _size(files.root)
    with _quiet():
        try:
            oneshot(
                model=model,
                recipe=calibration.recipe(),
                dataset=torch.utils.data.DataLoader(batches, batch_size=None),  # type: ignore[arg-type]
                max_seq_length=TEXT_TOKENS,
                num_calibration_samples=len(batches),
            )
        except (RuntimeError, ValueError, ArithmeticError) as error:
            kept = f"; --ignore {' '.join(calibration.ignore)} may leave it nothing to scale"
            raise UnsupportedModelError(
                f"llm-compressor cannot quantize {files.root} with {calibration.method}: {error}"
                + kept * bool(calibration.ignore)
            ) from error
        result = Converted(old_bytes=old_bytes)
        for index, (full, rounded) in enumerate(
            zip(before, _states(model, batches[0]), strict=True)
        ):
            error_of_layer = float((rounded - full).norm() / full.norm())
            result.errors[f"layer {index}"] = error_of_layer
            on_layer(f"layer {index}", error_of_layer)
        _write(model, tokenizer, files, output)
    result.new_bytes = _size(output)
    return result


def _batches(tokenizer: Any, texts: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Yield pieces of at most ``TEXT_TOKENS`` tokens, at most ``NUM_TEXTS`` of them."""
    num_batches = 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
        for piece in ids.split(TEXT_TOKENS):
            if len(piece) and num_batches < NUM_TEXTS:
                num_batches += 1
                yield {"input_ids": piece[None], "attention_mask": torch.ones_like(piece)[None]}


@torch.inference_mode()
def _states(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """The hidden states behind each layer, the last one normalized."""
    moved = {name: tensor.to(model.device) for name, tensor in batch.items()}
    states = model(**moved, output_hidden_states=True).hidden_states
    return [state.float().cpu() for state in states[1:]]


def _write(model: Any, tokenizer: Any, files: ModelFiles, output: Path) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as partial:
            folder = Path(partial, output.name)
            model.save_pretrained(folder, save_compressed=True)
            tokenizer.save_pretrained(folder)
            for name in matching(files.names, SMALL):
                path = checked_path(files.root, name)
                # The model's own files are better than what another version of a library makes of them.
                if path is not None and not matching([name], STALE):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, folder / name)
            for file in folder.glob("*.safetensors"):
                file.chmod(folder.stat().st_mode & 0o666)
            folder.rename(output)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error}") from error


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence llm-compressor's log, and keep it from pinning memory for an accelerator that is not there."""
    from llmcompressor.pipelines.cache import IntermediatesCache
    from loguru import logger

    pin = IntermediatesCache.pin_memory
    logger.disable("llmcompressor")
    logger.disable("compressed_tensors")
    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *args, **kwargs: None
    try:
        yield
    finally:
        IntermediatesCache.pin_memory = pin
        logger.enable("llmcompressor")
        logger.enable("compressed_tensors")
