"""``treadle list``, ``pull`` and ``rm``: the models of the Hugging Face cache."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from treadle.errors import ConfigError
from treadle.loading import fetch, parse_ref
from treadle.plugins import PluginManager
from treadle_command_models.command import bytes_text, print_table

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

__all__ = ("application_of",)

CacheDir = Annotated[
    Path | None,
    typer.Option("--cache-dir", help="Another Hugging Face cache.", show_default=False),
]


class CachedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the cache, with all of its revisions."""

    model: str
    revision: str
    """The commit of ``main``, or the newest."""
    bytes: int
    modified: float
    path: str


def list_models(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """List the models that were downloaded: size on the disk, and when they came."""
    models = [cached_model(repo) for repo in repos_of(cache_dir)]
    if json:
        print(msgspec.json.format(msgspec.json.encode(models)).decode())
    elif not models:
        print("no models in the cache; treadle pull ORG/NAME downloads one")
    else:
        rows = [
            (
                model.model,
                model.revision[:8],
                bytes_text(model.bytes),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified)),
            )
            for model in models
        ]
        print_table([("MODEL", "REVISION", "SIZE", "MODIFIED"), *rows])


def pull(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="org/name, or scheme:path.")],
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit.")
    ] = None,
    load_format: Annotated[
        str, typer.Option("--load-format", help="Format of the weights to download.")
    ] = "auto",
    cache_dir: CacheDir = None,
) -> None:
    """Download a model, with the progress bars of its source, and print its folder."""
    if Path(name).expanduser().is_dir():
        raise ConfigError(f"{name} is a folder of this machine; there is nothing to download")
    ref = parse_ref(name, revision, None if cache_dir is None else str(cache_dir))
    files = fetch(PluginManager(), ref, load_format)
    print(files.root)


def rm(
    names: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names of treadle list.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Delete models from the cache, with all of their revisions. Nothing else is ever deleted."""
    repos = {repo.repo_id: repo for repo in repos_of(cache_dir)}
    for name in names:
        if name not in repos:
            raise ConfigError(f"{name!r} is not in the cache; treadle list prints what is")
    chosen = [repos[name] for name in dict.fromkeys(names)]
    for repo in chosen:
        check_inside(repo, cache_dir)
    size = bytes_text(sum(repo.size_on_disk for repo in chosen))
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"this would delete {size}; give --yes")
        typer.confirm(f"Delete {', '.join(r.repo_id for r in chosen)} ({size})?", abort=True)
    for repo in chosen:
        try:
            shutil.rmtree(repo.repo_path)
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be deleted: {error.strerror}") from error
        shutil.rmtree(locks_of(repo), ignore_errors=True)
        print(f"deleted {repo.repo_id}, {bytes_text(repo.size_on_disk)}")


def repos_of(folder: Path | None) -> Sequence[CachedRepoInfo]:
    """The models of a cache, by name. Raises ``ConfigError`` if ``folder`` is given and no cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(folder).repos
    except (CacheNotFound, ValueError) as error:
        if folder is not None:
            raise ConfigError(f"--cache-dir {folder} is no folder of a cache: {error}") from error
        return []
    return sorted((r for r in repos if r.repo_type == "model"), key=lambda r: r.repo_id)


def cached_model(repo: CachedRepoInfo) -> CachedModel:
    newest: Any = max(
        repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified), default=None
    )
    return CachedModel(
        model=repo.repo_id,
        revision="" if newest is None else newest.commit_hash,
        bytes=repo.size_on_disk,
        modified=repo.last_modified,
        path=str(repo.repo_path),
    )


def check_inside(repo: CachedRepoInfo, folder: Path | None) -> None:
    """Raise ``ConfigError`` unless the files of a model lie in the cache itself."""
    if folder is None:
        from huggingface_hub.constants import HF_HUB_CACHE

        folder = Path(HF_HUB_CACHE)
    place = repo.repo_path
    if place.is_symlink() or place.resolve().parent != folder.expanduser().resolve():
        raise ConfigError(
            f"{repo.repo_id}: {place} leads out of the cache {folder}; delete it yourself"
        )


def locks_of(repo: CachedRepoInfo) -> Path:
    """Where the hub's library has locked the files of a model while it downloaded them."""
    return repo.repo_path.parent / ".locks" / repo.repo_path.name


COMMANDS: Mapping[str, Callable[..., None]] = {"list": list_models, "pull": pull, "rm": rm}


def application_of(name: str) -> typer.Typer:
    """The application of one of these commands."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name)(COMMANDS[name])
    return app
