"""The operation ``packed_linear``: products with weights of four and eight bits in the layout of
``treadle_layers_kit.packed_layout``.

Few rows are multiplied by one kernel (``kernel``), which reads each code once and makes a number of it in
registers; more on Hopper by another (``hopper.packed_kernel``), in which fetching, unpacking and products overlap. For
many the weight is unpacked and multiplied by the vendor's product.
"""
