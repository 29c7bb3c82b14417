"""Linear layers on Hopper, in Gluon, Triton's lower level, for what Triton itself does not offer: a warp
that does nothing but fetch, and warp groups that do nothing but multiply.

Decode batches, up to 256 rows (``small_batch``, ``small_batch_kernel``): the weight is read at the speed of memory
and its first tiles before the kernel ahead has ended, the gate is part of the product, and sums may stay in
parts. The gated product of prompts, from 1,024 rows on (``gated_linear``, ``gated_kernel``): bit for bit what torch's
linear and ``silu_and_mul`` give, with no ``[rows, 2 * width]`` in between, 1.02 to 1.24 times as fast on an H200.

Packed weights of four and eight bits, from 17 rows on (``packed_product``, ``packed_kernel``, ``packed_fragments``): codes become
fragments of tensor cores in registers while products run.
"""
