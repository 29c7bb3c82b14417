"""A deterministic simulator: the real client, engine, scheduler and grammars on virtual time."""
