"""Which files of a checkpoint are needed: its format is found, and nothing else is downloaded."""

from __future__ import annotations

import logging

import msgspec

from treadle.api.checkpoints import SMALL, WEIGHTS, check_folder, matching
from treadle.api.files import ModelFiles, ModelRef, SupportsRevisions
from treadle.api.kinds import MODEL_SOURCES
from treadle.config import EngineConfig
from treadle.errors import CheckpointError
from treadle.loading.sources import parse_ref
from treadle.plugins import PluginManager

__all__ = ("DETECTED", "detect_format", "fetch", "no_weights", "pin_revisions")

log = logging.getLogger("treadle.loading")

DETECTED = "safetensors"
"""The format of ``auto``. Others are read only by name: a file of ``torch.save`` is a pickle."""


def detect_format(files: ModelFiles) -> str | None:
    """Return the format of ``auto`` in which there are weights. Those of GGUF lie where its source says."""
    quantization = files.config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if matching(files.names, WEIGHTS[DETECTED]):
        return str(method) if method in ("bitsandbytes", "hqq", "quark", "torchao") else DETECTED
    return "gguf" if method == "gguf" else None


def fetch(
    plugins: PluginManager, ref: ModelRef, load_format: str = "auto", *, weights: bool = True
) -> ModelFiles:
    """Return the local files of a checkpoint: configuration, tokenizer and, optionally, weights.

    Every file of the folder that may be opened is checked first, whatever the source is. Raises
    ``CheckpointError``, also if ``auto`` finds no weights.
    """
    format = DETECTED if load_format == "auto" else load_format
    patterns = [*SMALL, *(WEIGHTS.get(format, ("*",)) if weights else ())]
    files = plugins.create_guarded(MODEL_SOURCES, ref.scheme).resolve(ref, patterns=patterns)
    check_folder(files)
    if weights and load_format == "auto" and detect_format(files) is None:
        raise no_weights(ref.path)
    return files


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
        f"{location} has no weights (looked for *.safetensors); check the folder. A .gguf file is named itself, PyTorch's "
        "(*.bin, *.pt, *.pth) are read only with load_format 'pt', and 'dummy' makes random weights"
    )
