"""An error on its way from one of our processes to another."""

from __future__ import annotations

import msgspec

from treadle import errors
from treadle.errors import EngineError, RequestError, TreadleError

__all__ = ("Failure", "printable")

# Names on the wire become classes through this table only.
_ERRORS: dict[str, type[TreadleError]] = {name: getattr(errors, name) for name in errors.__all__}


def printable(text: str) -> str:
    """Return ``text`` with lone surrogates, which UTF-8 cannot carry, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


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
