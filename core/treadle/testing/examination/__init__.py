"""Examining installed plugins without harm to this process: for suites, the doctor and the server."""
