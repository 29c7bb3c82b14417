"""Chat completions: prepared, then answered whole or as a stream."""
