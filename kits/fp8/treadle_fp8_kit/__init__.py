"""Products of FP8 matrices, for every plugin whose checkpoints have some."""
