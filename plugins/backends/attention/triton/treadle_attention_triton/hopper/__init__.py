"""Prompts on Hopper, after FlashAttention-3 (https://arxiv.org/abs/2407.08608), over pages.

Written in Gluon, Triton's lower level, for what Triton itself does not offer: a warp that does
nothing but fetch, two warp groups that take turns with the tensor cores so that one's softmax runs
beside the other's products, and one that overlaps its own softmax with the products before it.
1.3 to 1.5 times as fast as ``prefill_kernel`` on an H200, up to 616 TFLOP/s.
"""
