"""The operation ``int4_linear``: products with four-bit weights in the layout of ``treadle_layers_kit.int4_layout``.

Up to 16 rows Triton's kernel multiplies (``kernel``), as fast as memory delivers the weight. Beyond, on
Hopper, it is the kernel of all packed weights (``hopper.packed_kernel``), in which fetching, unpacking and
products overlap. On other devices Triton's serves up to 256 rows, and for more the weight is
unpacked and multiplied by the vendor's product.
"""
