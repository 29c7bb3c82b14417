"""Convert tokenizers in older formats with transformers, in a separate process.

transformers imports torch, which the API process must not, and its converters read untrusted files.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from treadle.api.checkpoints import SMALL, checked_path, files_in
from treadle.api.isolation import IsolatedProcess, serve_requests
from treadle.errors import CheckpointError

__all__ = ("convert_tokenizer", "main")

SECONDS = 300.0
OK, FAILED = b"+", b"-"


def convert_tokenizer(root: Path) -> str:
    """Return the ``tokenizer.json`` made from the files in ``root``. Raises ``CheckpointError``.

    transformers looks at a folder of links, which holds what may be read and nothing else.
    """
    process = IsolatedProcess("treadle_hf_tokenizer.conversion:main")
    try:
        with TemporaryDirectory(prefix="treadle-") as folder:
            for name in files_in(root, SMALL, str(root)).names:
                link = Path(folder, name)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(Path(checked_path(root, name) or root).resolve())
            response = process.request(folder.encode(), SECONDS)
    except TimeoutError:
        response = FAILED + f"it took more than {SECONDS:g} s".encode()
    except OSError:
        response = FAILED + b"the process that converts it died"
    finally:
        process.close()
    if response.startswith(OK):
        return response[1:].decode()
    raise CheckpointError(
        f"{root} has no tokenizer.json, and transformers cannot convert its tokenizer: "
        f"{response[1:].decode('utf-8', 'replace')}"
    )


def main(fd: int) -> None:
    """Run in the child: a folder's path in, the text of ``tokenizer.json`` out."""
    serve_requests(fd, _respond)


def _respond(root: bytes) -> bytes:
    try:
        return OK + _convert(root.decode()).encode()
    except Exception as error:  # a converter of an old format may raise anything
        return FAILED + f"{type(error).__name__}: {error}".encode()


def _convert(root: str) -> str:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(root, trust_remote_code=False).backend_tokenizer
    if not isinstance(backend, Tokenizer):
        raise TypeError(f"it became a {type(backend).__name__}, not a fast tokenizer")
    return str(backend.to_str())
