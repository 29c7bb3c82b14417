"""Where models lie: the Hugging Face cache, folders, and what other sources have on this disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from treadle.api.files import ModelRef
from treadle.api.kinds import MODEL_SOURCES
from treadle.errors import CheckpointError, ConfigError, PluginNotFoundError
from treadle.plugins import PluginManager

__all__ = ("ModelCandidate", "cached_models", "demo_models", "models_at")

SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):(?!\\)(.*)", re.IGNORECASE)

# What a source is asked for: a source that downloads must not be made to fetch weights for a list.
SMALL = ("config.json",)
# The one model of the scheme demo; a scheme alone is no name of a model.
DEMO = "treadle-demo"


@dataclass(frozen=True, slots=True)
class ModelCandidate:
    """A folder that may be a model; ``name`` is what ``treadle serve`` is given."""

    name: str
    root: Path


def cached_models(folder: Path | None = None) -> Iterator[ModelCandidate]:
    """The models of a Hugging Face cache, by name: of each, ``main`` or else the newest revision.

    Raises ``ConfigError`` if ``folder`` is given and not there.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(folder).repos
    except (CacheNotFound, ValueError) as error:
        if folder is not None:
            raise ConfigError(f"--cache-dir {folder} is no folder of a cache: {error}") from error
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model" and repo.revisions:
            revision = max(repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified))
            yield ModelCandidate(repo.repo_id, revision.snapshot_path)


def demo_models(plugins: PluginManager) -> Iterator[ModelCandidate]:
    """The demo model, if its plugin is installed."""
    if "demo" in plugins.keys("model_sources"):
        yield from _model_from_source(plugins, "demo", DEMO, f"demo:{DEMO}")


def models_at(plugins: PluginManager, text: str) -> Iterator[ModelCandidate]:
    """The models of one argument, a folder or ``scheme:path``.

    Raises ``ConfigError`` for what is neither, ``PluginNotFoundError`` for a scheme that nobody
    provides.
    """
    folder = Path(text).expanduser()
    if folder.is_dir():
        yield from _models_in_folder(folder)
        return
    match = SCHEME.fullmatch(text)
    if match is None:
        state = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{text} {state}; give a folder, or scheme:path such as demo:")
    scheme = match[1].lower()
    if scheme in ("file", "hf"):
        raise ConfigError(
            f"{text}: give a folder as it is; the Hugging Face cache is listed without arguments"
        )
    if text == "demo:":
        yield from demo_models(plugins)
        return
    yield from _model_from_source(plugins, scheme, match[2], text)


def _models_in_folder(folder: Path) -> Iterator[ModelCandidate]:
    """The folder itself if it is a model, else those below: ``name`` and ``org/name``."""
    if (folder / "config.json").is_file():
        yield ModelCandidate(str(folder), folder)
        return
    for pattern in ("*/config.json", "*/*/config.json"):
        for file in sorted(folder.glob(pattern)):
            if not file.relative_to(folder).parts[0].startswith("."):
                yield ModelCandidate(str(file.parent), file.parent)


def _model_from_source(
    plugins: PluginManager, scheme: str, path: str, text: str
) -> Iterator[ModelCandidate]:
    try:
        files = plugins.create(MODEL_SOURCES, scheme).resolve(
            ModelRef(scheme, path), patterns=SMALL
        )
    except (PluginNotFoundError, ConfigError):
        raise
    except CheckpointError as error:
        raise ConfigError(f"{text}: {error}") from error
    yield ModelCandidate(text, files.root)
