"""The JSON of the API as msgspec Structs, one module for each endpoint.

Clients send ``null`` for what they leave open, so every optional field takes ``None``.
"""
