"""Route handlers, one module for each endpoint; ``handlers(context)`` makes them for a server."""
