"""``treadle plugin docs``: the reference page of a kind, from the files that this distribution ships.

``pages`` is the folder ``docs/ref/plugins`` of the repository. A kind of another distribution has no
page there; what its declaration says is printed instead.
"""

from __future__ import annotations

import inspect
import re
from importlib.resources import files

from treadle.errors import ConfigError
from treadle.plugins import installed_kinds

__all__ = ("page",)

_COMMENT = re.compile(r"<!-- .*? -->\n*", re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")


def page(kind: str) -> str:
    """Return the page of ``kind`` as Markdown. Raises ``ConfigError`` for an unknown kind."""
    kinds = installed_kinds()
    if kind not in kinds:
        raise ConfigError(f"there is no plugin kind {kind!r}; known kinds: {', '.join(kinds)}")
    file = files("treadle_cli") / "pages" / f"{kind}.md"
    if file.is_file():
        # The other pages of the documentation are not shipped: a link to one would lead nowhere.
        return _LINK.sub(r"\1", _COMMENT.sub("", file.read_text(encoding="utf-8")))
    declared = kinds[kind]
    hook = getattr(declared.specs, declared.hook)
    parts = [
        f"# {kind}",
        f"A kind of {declared.owner}: group `{declared.group}`, key: {declared.key}, "
        f"mode *{declared.mode}*, generation {declared.generation}.",
        f"```text\n{declared.hook}{inspect.signature(hook)}\n```",
        inspect.getdoc(hook) or "",
    ]
    if declared.builds is not None:
        parts.append(f"```python\n{inspect.getsource(declared.builds)}```")
    return "\n\n".join(part for part in parts if part) + "\n"
