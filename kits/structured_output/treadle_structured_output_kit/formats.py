"""Formats of texts: which the standard knows, and some as patterns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle_structured_output_kit.drafts import map_children

__all__ = ("FORMATS", "PATTERNS", "PLAIN_PATTERNS", "UNKNOWN_TO_GRAMMARS", "dates_as_patterns")

FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6",
     "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri",
     "uri-reference", "uri-template", "uuid"}
)  # fmt: skip
"""The formats of the standard. Any other is an annotation, and says nothing about a value."""

LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP}-02-29)"
)
TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?"
    r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
PATTERNS = {
    "date": f"^{DATE}$",
    "date-time": f"^{DATE}[Tt]{TIME}$",
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
}
"""Formats that libraries of grammars do not know, or know less well: dates with 30 days in February."""

OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOST = rf"{LABEL}(?:\.{LABEL})*"
ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
H16 = "[0-9A-Fa-f]{1,4}"
IPV6 = "|".join(
    [f"(?:{H16}:){{7}}{H16}", f"(?:{H16}:){{1,7}}:", f":(?::{H16}){{1,7}}", "::"]
    + [f"(?:{H16}:){{{i}}}(?::{H16}){{1,{7 - i}}}" for i in range(1, 7)]
)
DAYS, SECONDS = "[0-9]+D", "[0-9]+S"
DAYS = f"(?:{DAYS}|[0-9]+M(?:{DAYS})?|[0-9]+Y(?:[0-9]+M(?:{DAYS})?)?)"
HOURS = f"T(?:{SECONDS}|[0-9]+M(?:{SECONDS})?|[0-9]+H(?:[0-9]+M(?:{SECONDS})?)?)"
CHAR = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
AUTHORITY = rf"//(?:[A-Za-z0-9._~!$&'()*+,;=:-]*@)?(?:{HOST}|\[(?:{IPV6})\])?(?::[0-9]*)?"
PATH = f"(?:{AUTHORITY}(?:/{CHAR}*)*|/?{CHAR}+(?:/{CHAR}*)*)"
PLAIN_PATTERNS = {
    **PATTERNS,
    "duration": f"^P(?:[0-9]+W|{DAYS}(?:{HOURS})?|{HOURS})$",
    "email": f"^{ATOM}(?:\\.{ATOM})*@{HOST}$",
    "hostname": f"^{HOST}$",
    "ipv4": rf"^{OCTET}(?:\.{OCTET}){{3}}$",
    "ipv6": f"^(?:{IPV6})$",
    "time": f"^{TIME}$",
    "uri": rf"^[A-Za-z][A-Za-z0-9+.-]*:{PATH}(?:\?(?:{CHAR}|[/?])*)?(?:#(?:{CHAR}|[/?])*)?$",
    "uuid": "^[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$",
}
"""Formats of texts that no library reads, because they are not between quotes."""

UNKNOWN_TO_GRAMMARS = ("json-pointer", "relative-json-pointer")


def dates_as_patterns(schema: Any) -> Any:
    """``schema`` with a pattern instead of the formats ``date`` and ``date-time``, where it has none."""
    if not isinstance(schema, Mapping):
        return schema
    new = map_children(schema, dates_as_patterns)
    if new.get("format") in ("date", "date-time") and "pattern" not in new:
        new["pattern"] = PATTERNS[new.pop("format")]
    return new
