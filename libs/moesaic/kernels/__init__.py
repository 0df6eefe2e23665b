"""Kernels: one a file, each with its contract."""
