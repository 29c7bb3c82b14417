"""Which files of a checkpoint are needed: its format is found, and nothing else is downloaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from treadle.api.checkpoints import SMALL, WEIGHTS, check_folder, matching
from treadle.api.files import ModelFiles, ModelRef, SupportsRevisions
from treadle.api.kinds import MODEL_SOURCES
from treadle.config import EngineConfig
from treadle.errors import CheckpointError
from treadle.loading.sources import parse_ref
from treadle.plugins import PluginManager

__all__ = ("detect_format", "fetch", "no_weights", "pin_revisions")

log = logging.getLogger("treadle.loading")

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

    def resolve(patterns: Sequence[str]) -> ModelFiles:
        files = source.resolve(ref, patterns=patterns)
        check_folder(files)
        return files

    if not weights:
        return resolve(SMALL)
    if load_format != "auto":
        return resolve([*SMALL, *WEIGHTS.get(load_format, ("*",))])
    for name in DETECTED:
        files = resolve([*SMALL, *WEIGHTS[name]])
        if detect_format(files) is not None:
            return files
    raise no_weights(ref.path)


def pin_revisions(config: EngineConfig, plugins: PluginManager) -> EngineConfig:
    """Return ``config`` with the commits that its branches and tags mean now.

    Frontend, engine and grammar compilers each call ``fetch``. A branch may move in between.
    """
    model = config.model
    names = {"revision": model.model}
    if model.tokenizer is not None or model.tokenizer_revision is not None:
        names["tokenizer_revision"] = model.tokenizer or model.model
    pinned = {}
    for option, name in names.items():
        ref = parse_ref(name, getattr(model, option), model.download_dir)
        source = plugins.create_guarded(MODEL_SOURCES, ref.scheme)
        if isinstance(source, SupportsRevisions):
            pinned[option] = source.resolve_revision(ref)
            log.info("%s at %s is revision %s", name, ref.revision or "HEAD", pinned[option])
    return msgspec.structs.replace(config, model=msgspec.structs.replace(model, **pinned))


def no_weights(location: object) -> CheckpointError:
    """Return the error for a checkpoint without weights."""
    return CheckpointError(
        f"{location} has no weights (looked for *.safetensors, *.bin, *.pt); check the folder, "
        "set another load_format, or use load_format 'dummy' for random weights"
    )
