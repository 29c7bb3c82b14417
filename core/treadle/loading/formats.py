"""Which files of a checkpoint are needed: its format is found, and nothing else is downloaded."""

from __future__ import annotations

from treadle.api.checkpoints import SMALL, WEIGHTS, matching
from treadle.api.files import ModelFiles, ModelRef
from treadle.api.kinds import MODEL_SOURCES
from treadle.errors import CheckpointError
from treadle.plugins import PluginManager

__all__ = ("detect_format", "fetch", "no_weights")

DETECTED = ("safetensors", "pt")
"""The formats of ``auto``, the preferred one first."""


def detect_format(files: ModelFiles) -> str | None:
    """Return ``safetensors`` if there are any, else ``pt``; ``None`` if there are no weights."""
    return next((name for name in DETECTED if matching(files.names, WEIGHTS[name])), None)


def fetch(
    plugins: PluginManager, ref: ModelRef, load_format: str = "auto", *, weights: bool = True
) -> ModelFiles:
    """Return the local files of a checkpoint: configuration, tokenizer and, optionally, weights.

    ``auto`` uses PyTorch files only if there are no safetensors, so that a hub checkpoint with
    both is not downloaded twice. Raises ``CheckpointError`` if there are no weights.
    """
    source = plugins.create_guarded(MODEL_SOURCES, ref.scheme)
    if not weights:
        return source.resolve(ref, patterns=SMALL)
    if load_format != "auto":
        return source.resolve(ref, patterns=[*SMALL, *WEIGHTS.get(load_format, ("*",))])
    for name in DETECTED:
        files = source.resolve(ref, patterns=[*SMALL, *WEIGHTS[name]])
        if detect_format(files) is not None:
            return files
    raise no_weights(ref.path)


def no_weights(location: object) -> CheckpointError:
    """Return the error for a checkpoint without weights."""
    return CheckpointError(
        f"{location} has no weights (looked for *.safetensors, *.bin, *.pt); check the folder, "
        "set another load_format, or use load_format 'dummy' for random weights"
    )
