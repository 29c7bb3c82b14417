"""A small client of any server with OpenAI's API, for ``treadle chat --url`` and ``treadle bench serve``.

It is written for measuring: each piece of a response has the time at which its bytes arrived, and
reading one costs a few microseconds, so that the client does not limit what it measures.
"""

from treadle_cli.client.address import Address
from treadle_cli.client.connection import Connection, Response
from treadle_cli.client.events import Event, EventReader
from treadle_cli.client.server import Server, error_of

__all__ = ("Address", "Connection", "Event", "EventReader", "Response", "Server", "error_of")
