"""What the scripts beside this file share: the questions, and how their checks are run and named."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Mapping
from typing import Any

__all__ = ("CAPITAL", "KEY", "LONG", "MODEL", "PARAMETERS", "SUM", "URL", "WEATHER", "run")

URL, KEY = sys.argv[1:3]
MODEL = "demo"
CAPITAL = "What is the capital of Italy?"
WEATHER = "What is the weather in Paris?"
SUM = "What is 12 plus 30?"
LONG = "word " * 100_000
"""A prompt for which the context has no room."""
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


def run(names: Mapping[str, Any]) -> None:
    """Run each ``check_NAME`` and print the names of those that pass. Exits with 1 if one fails."""
    failed = False
    for name, check in list(names.items()):
        if name.startswith("check_"):
            try:
                result = check()
                if asyncio.iscoroutine(result):
                    asyncio.run(result)
            except Exception:
                failed = True
                print(name, "failed", file=sys.stderr)
                traceback.print_exc()
            else:
                print(name.removeprefix("check_"))
    sys.exit(failed)
