"""Matrices as the tools of others store them: formats for ``treadle.testing.quantization``."""
