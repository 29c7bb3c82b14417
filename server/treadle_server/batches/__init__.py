"""Files and batches: many requests in a file, run when there is room, answered in a file."""
