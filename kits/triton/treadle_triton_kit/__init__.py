"""What Triton and Gluon kernels are built on."""
