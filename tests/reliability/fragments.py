"""Pieces of JSON that some server, somewhere, has stumbled over; as bytes, as no encoder writes them."""

from __future__ import annotations

__all__ = ("FRAGMENTS", "KEYWORDS")

KILO, MUCH = 1_000, 100_000


def _nested(depth: int, opening: bytes, closing: bytes) -> bytes:
    return opening * depth + b"0" + closing * depth


FRAGMENTS: dict[str, bytes] = {
    # numbers
    "zero": b"0",
    "one": b"1",
    "minus one": b"-1",
    "minus zero": b"-0",
    "minus zero point zero": b"-0.0",
    "half": b"0.5",
    "2^31": b"2147483648",
    "-2^31-1": b"-2147483649",
    "2^63": b"9223372036854775808",
    "-2^63": b"-9223372036854775808",
    "-2^63-1": b"-9223372036854775809",
    "2^64-1": b"18446744073709551615",
    "2^64": b"18446744073709551616",
    "10^20": b"1" + b"0" * 20,
    "-10^20": b"-1" + b"0" * 20,
    "10^309": b"1" + b"0" * 309,
    "a number of 5000 digits": b"9" * 5 * KILO,
    "10^5 digits after the point": b"0." + b"1" * MUCH,
    "1e20": b"1e20",
    "1e308": b"1e308",
    "1e309": b"1e309",
    "1e400": b"1e400",
    "-1e400": b"-1e400",
    "1e-400": b"1e-400",
    "1e99999999999": b"1e99999999999",
    "a whole float": b"2.0",
    # numbers that are not JSON
    "NaN": b"NaN",
    "Infinity": b"Infinity",
    "-Infinity": b"-Infinity",
    "01": b"01",
    "+1": b"+1",
    "hexadecimal": b"0x10",
    # text
    "empty text": b'""',
    "text": b'"a"',
    "NUL": b'"a\\u0000b"',
    "raw NUL": b'"a\x00b"',
    "raw newline": b'"a\nb"',
    "lone high surrogate": b'"\\ud800"',
    "lone low surrogate": b'"\\udc00"',
    "swapped surrogates": b'"\\udc00\\ud800"',
    "surrogate as bytes": b'"\xed\xa0\x80"',
    "not UTF-8": b'"\xff\xfe"',
    "byte order mark": b'"\xef\xbb\xbf"',
    "a character of four bytes": '"\U0010ffff"'.encode(),
    "10^5 letters": b'"' + b"a" * MUCH + b'"',
    "10^5 escapes": b'"' + b"\\u0001" * MUCH + b'"',
    "a number as text": b'"1e400"',
    "3000 parentheses": b'"' + b"(" * 3 * KILO + b"a" + b")" * 3 * KILO + b'"',
    "repeated repetition": b'"((a{1,60}){1,60}){1,60}"',
    "special tokens": b'"<|im_start|>system<|im_end|><s></s>"',
    "a template": b'"{{ self.__init__.__globals__ }}{% for a in range(9) %}"',
    "a path": b'"../../../../etc/passwd\\u0000.json"',
    "a format": b'"%s%n{0.__class__}"',
    "controls": b'"\\u001b[31m\\r\\nx-evil: 1\\u202e\\u2028"',
    "an unclosed string": b'"a',
    # the other kinds
    "true": b"true",
    "false": b"false",
    "null": b"null",
    "nothing": b"",
    "an unknown word": b"None",
    # arrays and objects
    "empty array": b"[]",
    "array of null": b"[null]",
    "array of everything": b'[0,-1,1e300,"a","\\u0000",true,null,[],{}]',
    "nested text": b'[["a"],[["b"]]]',
    "negative ids": b"[-1,-9223372036854775808]",
    "ids beyond": b"[0,1,4294967296,18446744073709551615]",
    "10^5 numbers": b"[" + b"7," * MUCH + b"7]",
    "10^4 texts": b"[" + b'"a",' * 10 * KILO + b'"a"]',
    "empty object": b"{}",
    "odd keys": b'{"":1,"\\u0000":2,"__class__":3,"$ref":"#","self":4,"-1":5,"1e400":6}',
    "a key that is a lone surrogate": b'{"\\ud800":1}',
    "the same key twice": b'{"a":1,"a":{"a":[]}}',
    "10^5 keys": b"{" + b",".join(b'"k%d":0' % i for i in range(MUCH)) + b"}",
    "ids as keys": b'{"0":1e308,"-1":1,"99999999":1,"18446744073709551616":1}',
    "an array in depth 50": _nested(50, b"[", b"]"),
    "an array in depth 70": _nested(70, b"[", b"]"),
    "an array in depth 10^5": _nested(MUCH, b"[", b"]"),
    "an object in depth 50": _nested(50, b'{"a":', b"}"),
    "an object in depth 10^4": _nested(10 * KILO, b'{"a":', b"}"),
    "a trailing comma": b"[1,]",
    "an open bracket": b"[[",
    # what a schema may be
    "a schema": b'{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}',
    "a schema of itself": b'{"$ref":"#"}',
    "a schema from elsewhere": b'{"$ref":"http://127.0.0.1:9/x.json"}',
    "a schema of a missing part": b'{"$ref":"#/$defs/none"}',
    "an impossible schema": b'{"type":"string","enum":[1],"minLength":9,"maxLength":1}',
    "a schema of odd constants": b'{"enum":[-0.0,1e300,"\\u0000",null,[],{}]}',
    "a long alternative": b'{"anyOf":[' + b'{"const":1},' * 300 + b'{"const":2}]}',
}

KEYWORDS = (
    *(
        "type",
        "enum",
        "const",
        "properties",
        "required",
        "items",
        "prefixItems",
        "pattern",
        "format",
    ),
    *("minimum", "maximum", "exclusiveMinimum", "multipleOf", "minLength", "maxLength", "minItems"),
    *("maxItems", "uniqueItems", "minProperties", "additionalProperties", "patternProperties"),
    *("anyOf", "oneOf", "allOf", "not", "if", "$ref", "$defs", "$schema", "default", "description"),
)
"""Keywords of JSON schemas, each of which gets every fragment as its value."""
