"""``treadle bench serve``: load on any OpenAI-compatible server, and what its clients wait for."""
