"""Converts tokenizers in older formats with transformers, outside of this process.

transformers brings torch, which the process of an API must not import; and what a converter does
with the files of a checkpoint is better done where nothing else lives.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from treadle.errors import CheckpointError
from treadle.processes.spawn import spawn

__all__ = ("converted", "main")

SECONDS = 300.0
GOOD, BAD = b"+", b"-"


def converted(root: Path) -> str:
    """What ``tokenizer.json`` of the checkpoint in ``root`` would hold. Raises ``CheckpointError``."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            child = spawn("treadle.text.conversion:main", theirs)
        try:
            ours.settimeout(SECONDS)
            ours.sendall(str(root).encode())
            ours.shutdown(socket.SHUT_WR)
            answer = _all(ours)
        except TimeoutError:
            answer = BAD + f"it took more than {SECONDS:g} s".encode()
        finally:
            child.kill()  # it has said everything, or will not
            child.wait()
    if answer.startswith(GOOD):
        return answer[1:].decode()
    why = answer[1:].decode("utf-8", "replace") or "the process that converts it died"
    raise CheckpointError(
        f"{root} has no tokenizer.json, and transformers cannot convert its tokenizer: {why}"
    )


def _all(sock: socket.socket) -> bytes:
    data = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(1 << 20):
            data += piece
    return bytes(data)


def main(fd: int) -> None:
    """The entry of the child: a folder in, a ``tokenizer.json`` out."""
    with socket.socket(fileno=fd) as sock:
        try:
            answer = GOOD + _convert(_all(sock).decode()).encode()
        except Exception as error:  # whatever a converter of an old format raises
            answer = BAD + f"{type(error).__name__}: {error}".encode()
        sock.sendall(answer)


def _convert(root: str) -> str:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(root, trust_remote_code=False).backend_tokenizer
    if not isinstance(backend, Tokenizer):
        raise TypeError(f"it became a {type(backend).__name__}, not a fast tokenizer")
    return str(backend.to_str())
