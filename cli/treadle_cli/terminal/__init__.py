"""What commands write to a terminal, and how Ctrl-C reaches them."""

from treadle_cli.terminal.interrupt import Interrupt, interruptible, uninterrupted
from treadle_cli.terminal.screen import Screen
from treadle_cli.terminal.spinner import Spinner
from treadle_cli.terminal.stream import Answer, follow

__all__ = ("Answer", "Interrupt", "Screen", "Spinner", "follow", "interruptible", "uninterrupted")
