"""Around calls of what one plugin has built: whoever fails is named, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NoReturn

from treadle.errors import PluginError, PluginLoadError, TreadleError
from treadle.plugins.call_stats import PASSED, Calls, Tally
from treadle.plugins.entries import Entry

__all__ = ("Guard",)


class Guard:
    """Calls methods of the objects of one plugin.

    What they raise becomes an ``error`` that names plugin, method and cause, which is chained. Three
    things pass as they are: what another guard has named already, what is meant for the process
    (``PASSED``), and, but for steps, every ``TreadleError``: it was said on purpose.
    """

    def __init__(
        self, entry: Entry, tally: Tally, error: type[TreadleError] = PluginLoadError
    ) -> None:
        self.entry = entry
        self._tally = tally
        self._error = error

    @contextmanager
    def watching(self, method: str, *, step: bool = False) -> Iterator[None]:
        """The block is one call of ``method``. In a ``step`` no ``TreadleError`` is meant for users."""
        began = perf_counter()
        try:
            yield
        except PASSED:
            raise
        except BaseException as error:
            if not isinstance(error, PluginError):
                self._tally.failed(self.entry.id, method, began)
            if isinstance(error, PluginError) or (isinstance(error, TreadleError) and not step):
                raise
            raise self._named(method, error) from error
        self._tally.done(self.entry.id, method, began)

    def call(self, target: Any, method: str, /, *arguments: Any, **more: Any) -> Any:
        """``target.method(…)``. A ``target`` without that method is the plugin's failure too."""
        with self.watching(method):
            return getattr(target, method)(*arguments, **more)

    def fail(self, method: str, error: BaseException) -> NoReturn:
        """Count and raise what ``method`` has raised, where calls are too many to count each."""
        if isinstance(error, PluginError):
            raise error
        self.failed(method)
        raise self._named(method, error) from error

    def _named(self, method: str, error: BaseException) -> TreadleError:
        named = self._error(self.entry.failure(method, error))
        if isinstance(named, PluginError):
            named.plugin = self.entry.id
        return named

    def failed(self, method: str) -> None:
        """Count a failure without a time of its own."""
        self._tally.failed(self.entry.id, method, perf_counter())

    def wrong(self, method: str, found: object, wanted: str) -> NoReturn:
        """``method`` has returned ``found``, which is not what it must."""
        shape = getattr(found, "shape", None)
        said = f"a tensor {list(shape)}" if shape is not None else f"{found!r:.80}"
        self.fail(method, TypeError(f"it returned {said}; {wanted} is wanted"))

    def calls(self, method: str) -> Calls:
        """The counter of a method for its only caller, who may count many at a time."""
        return self._tally.calls(self.entry.id, method)
