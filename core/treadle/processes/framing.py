"""Messages on a stream socket: four bytes of length, little-endian, then the payload."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import msgspec

from treadle.errors import EngineError, RequestError

__all__ = ("MAX_FRAME_BYTES", "FrameDecoder", "encode_frame", "receive_frame", "send_frame")

PREFIX_BYTES = 4
MAX_FRAME_BYTES = 256 * 2**20
RECEIVE_BYTES = 256 * 1024

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct) -> bytearray:
    """Return ``message`` as a msgpack frame. Raises ``RequestError`` if it is too long to send."""
    data = bytearray(PREFIX_BYTES)
    _encoder.encode_into(message, data, PREFIX_BYTES)
    size = len(data) - PREFIX_BYTES
    if size > MAX_FRAME_BYTES:
        raise RequestError(
            f"a message to the engine has {size} bytes; at most {MAX_FRAME_BYTES} are allowed: "
            "send shorter prompts"
        )
    data[:PREFIX_BYTES] = size.to_bytes(PREFIX_BYTES, "little")
    return data


class FrameDecoder:
    """Splits a stream of bytes into the payloads of its frames."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Append received bytes and yield each complete payload. Exhaust the iterator.

        Raises ``EngineError`` for a frame longer than ``MAX_FRAME_BYTES``.
        """
        buffer = self._data
        buffer += data
        start = 0
        while len(buffer) - start >= PREFIX_BYTES:
            size = int.from_bytes(buffer[start : start + PREFIX_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                raise EngineError(
                    f"received a frame of {size} bytes; at most {MAX_FRAME_BYTES} are allowed"
                )
            end = start + PREFIX_BYTES + size
            if len(buffer) < end:
                break
            yield bytes(buffer[start + PREFIX_BYTES : end])
            start = end
        if start:
            del buffer[:start]


def send_frame(sock: socket.socket, payload: bytes) -> None:
    """Write one frame to a blocking socket."""
    sock.sendall(len(payload).to_bytes(PREFIX_BYTES, "little") + payload)


def receive_frame(sock: socket.socket, seconds: float | None = None) -> bytes:
    """Read one payload from a blocking socket, all of it within ``seconds``.

    Raises ``TimeoutError``, and ``ConnectionError`` at the end of the stream or for a frame longer
    than ``MAX_FRAME_BYTES``.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    size = int.from_bytes(_receive_exactly(sock, PREFIX_BYTES, deadline), "little")
    if size > MAX_FRAME_BYTES:
        raise ConnectionError(f"the other process sends a frame of {size} bytes")
    return _receive_exactly(sock, size, deadline)


def _receive_exactly(sock: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            sock.settimeout(left)
        piece = sock.recv(min(RECEIVE_BYTES, size - len(data)))
        if not piece:
            raise ConnectionError("the other process closed the socket")
        data += piece
    return bytes(data)
