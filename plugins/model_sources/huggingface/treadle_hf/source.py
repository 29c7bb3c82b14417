"""Downloads checkpoints with the hub's own library, and says what to do where it cannot."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from treadle.api.checkpoints import BESIDE, files_in
from treadle.api.files import ModelFiles, ModelRef
from treadle.errors import CheckpointError

__all__ = ("HubSource",)


COMMIT = re.compile(r"[0-9a-f]{40}")


class HubSource:
    """The Hugging Face hub. ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` have their usual meaning."""

    def resolve_revision(self, ref: ModelRef) -> str:
        """Return the commit of the reference's branch or tag: the hub's, or offline the cache's.

        Raises ``CheckpointError`` like ``resolve``.
        """
        if ref.revision is not None and COMMIT.fullmatch(ref.revision):
            return ref.revision
        return self._download(ref, ["config.json"]).name

    def resolve(self, ref: ModelRef, *, patterns: Sequence[str]) -> ModelFiles:
        """Download missing files, with the hub library's progress bars.

        Raises ``CheckpointError`` if the checkpoint does not exist, is gated, or is neither
        reachable nor in the cache.
        """
        return files_in(self._download(ref, patterns), patterns, ref.path)

    def _download(self, ref: ModelRef, patterns: Sequence[str]) -> Path:
        """Return the folder of one commit, which has the commit's name."""
        import huggingface_hub

        try:
            root = huggingface_hub.snapshot_download(
                ref.path,
                revision=ref.revision,
                cache_dir=ref.download_dir,
                allow_patterns=list(patterns),
                ignore_patterns=list(BESIDE),
            )
        except Exception as error:  # the hub library raises its own, httpx's and OS errors
            raise CheckpointError(self._failure_reason(ref, error)) from error
        return Path(root)

    @staticmethod
    def _failure_reason(ref: ModelRef, error: Exception) -> str:
        from huggingface_hub import constants, errors

        name = f"{ref.path!r} at revision {ref.revision!r}" if ref.revision else repr(ref.path)
        if isinstance(error, errors.HFValidationError):
            return (
                f"{ref.path!r} is neither an existing folder nor a hub name (org/name); "
                "check the spelling or the path"
            )
        if constants.HF_HUB_OFFLINE:
            return (
                f"the checkpoint {name} is not in the local cache and HF_HUB_OFFLINE is set; "
                "unset it, download the checkpoint first, or give a folder"
            )
        if isinstance(error, errors.GatedRepoError):
            return (
                f"the checkpoint {name} is gated; accept its licence on the hub and set HF_TOKEN "
                "to a token that may read it"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return f"the checkpoint {ref.path!r} has no revision {ref.revision!r} on the hub"
        if isinstance(error, errors.RepositoryNotFoundError):
            return (
                f"no folder and no hub checkpoint {name} exists, or it is private; check the "
                "spelling, or set HF_TOKEN to a token that may read it"
            )
        return f"the checkpoint {name} could not be downloaded: {type(error).__name__}: {error}"
