"""Products of matrices in FP8 and in int8, for every plugin whose checkpoints have some."""
