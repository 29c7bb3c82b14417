"""Data of the suite of tool parsers: calls written as JSON, sound and malformed."""

from __future__ import annotations

__all__ = ("MALFORMED", "SOUND")

SOUND = '{"name": "f", "arguments": {"x": 1}}'
MALFORMED = (
    '{"name": "g"}',
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": {x: 1}}',
    '{"name": "f", "arguments": {"x" 1}}',
    '{"name": "f", "arguments": {]}}',
    '{"name": "f" "arguments": {"x": 1}}',
    '{"name": "", "arguments": {}}',
    '{"name": 3, "arguments": {"x": 1}}',
    '{"arguments": {"x": 1}}',
    '{"name": "f", "arguments": "no"}',
)
"""Each is wrong before its first argument: what streams can be taken back until then."""
