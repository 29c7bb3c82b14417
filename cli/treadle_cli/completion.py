"""Names that Tab completes: models on this machine, and plugins by kind. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ("completer_of", "model_names")

KINDS = {
    "attention_backend": "attention_backends",
    "distributed_executor_backend": "executors",
    "load_format": "load_formats",
    "logits_processors": "logits_processors",
    "quantization": "quantization",
    "reasoning_parser": "reasoning_parsers",
    "renderer": "renderers",
    "scheduling_policy": "scheduling_policies",
    "stat_loggers": "stat_loggers",
    "structured_output_backends": "structured_output",
    "tokenizer_mode": "tokenizers",
    "tool_call_parser": "tool_parsers",
}
"""Options that name plugins, with the kind of each."""

OWN_VALUES = {"device": ("auto", "cpu", "cuda")}
DEMO = "demo:treadle-demo"


def completer_of(option: str) -> Callable[..., list[str]] | None:
    """Return what completes the value of an option; ``None`` to let the shell complete files."""
    if option in ("model", "tokenizer"):
        return lambda incomplete: [n for n in model_names() if n.startswith(incomplete)]
    if option in KINDS:
        return lambda incomplete: [
            n for n in plugin_keys(KINDS[option]) if n.startswith(incomplete)
        ]
    if option in OWN_VALUES:
        return lambda incomplete: [n for n in OWN_VALUES[option] if n.startswith(incomplete)]
    return None


def plugin_keys(kind: str) -> list[str]:
    """The keys of the usable plugins of a kind, from metadata."""
    from treadle.plugins import PluginManager

    manager = PluginManager()
    keys = [key for key in manager.keys(kind) if key != "*"]
    automatic = kind in ("tool_parsers", "reasoning_parsers", "renderers", "quantization")
    return ["auto", *keys] if automatic and "auto" not in keys else keys


def model_names() -> Iterator[str]:
    """The demo model and the models of the Hugging Face cache, by the names of their folders."""
    yield DEMO
    folder = cache_folder()
    if folder is not None:
        for path in sorted(folder.glob("models--*")):
            if any(path.glob("snapshots/*/config.json")):
                yield path.name.removeprefix("models--").replace("--", "/")


def cache_folder() -> Path | None:
    """The hub's cache, ``None`` without its library or if there is no cache yet."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return None
    folder: Any = Path(HF_HUB_CACHE)
    return folder if folder.is_dir() else None
