"""Getting the files of a checkpoint that its format needs, and no others."""

from __future__ import annotations

from treadle.api.files import ModelFiles, ModelRef
from treadle.api.kinds import MODEL_SOURCES
from treadle.errors import CheckpointError
from treadle.loading.formats import SMALL, WEIGHTS, detect_format
from treadle.plugins import PluginManager

__all__ = ("fetch",)


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
    for name in ("safetensors", "pt"):
        files = source.resolve(ref, patterns=[*SMALL, *WEIGHTS[name]])
        if detect_format(files) is not None:
            return files
    raise CheckpointError(
        f"{ref.path} has no weights (looked for *.safetensors, *.bin, *.pt); check the folder, "
        "set another load_format, or use load_format 'dummy' for random weights"
    )
