"""The kernels for CUDA devices, in Triton, each beside its torch reference."""
