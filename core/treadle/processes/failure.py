"""An error on its way from one of our processes to another."""

from __future__ import annotations

import signal
import traceback

import msgspec

from treadle import errors
from treadle.errors import EngineError, RequestError, TreadleError

__all__ = ("Failure", "is_for_process", "printable", "strict_error")

# Names on the wire become classes through this table only.
_ERRORS: dict[str, type[TreadleError]] = {name: getattr(errors, name) for name in errors.__all__}


def printable(text: str) -> str:
    """Return ``text`` with lone surrogates, which UTF-8 cannot carry, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_for_process(error: BaseException) -> bool:
    """Return whether an exception is for the process, even if a plugin was running: Control-C, and
    the end that a signal handler of the program asks for. ``sys.exit`` of a plugin is a failure."""
    if not isinstance(error, SystemExit):
        return isinstance(error, KeyboardInterrupt)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    codes = [getattr(handler, "__code__", None) for handler in handlers]
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def strict_error(error: object) -> EngineError:
    """Return the error that a failure with the words of ``error`` is in strict mode."""
    return EngineError(f"{error} (plugin_strict makes it fatal)")


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The class name, the message and, of a ``RequestError``, the parameter of an error."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure for ``error``. An error that is not treadle's is an ``EngineError``
        whose message begins with the name of its type."""
        name = type(error).__name__
        text = printable(str(error))
        if isinstance(error, TreadleError) and name in _ERRORS:
            return cls(name, text, getattr(error, "param", None))
        return cls("EngineError", f"{name}: {text}" if text else name)

    def error(self) -> TreadleError:
        """Return the error again. An unknown class name becomes an ``EngineError``."""
        type_ = _ERRORS.get(self.kind, EngineError)
        if issubclass(type_, RequestError):
            return type_(self.message, param=self.param)
        return type_(self.message)
