"""What lets programs of another engine run: ``treadle.compat.vllm``, if treadle-compat is installed.

The modules lie in the package ``treadle_compat`` and are imported under this name only.
"""

from importlib.util import find_spec

__all__: tuple[str, ...] = ()

_spec = find_spec("treadle_compat")
__path__ = list(_spec.submodule_search_locations or ()) if _spec is not None else []
