"""Kernels for CPUs: C in GNU's dialect, compiled once for each kind of processor."""
