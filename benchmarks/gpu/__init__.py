"""Measurements for a CUDA device that is lent for minutes: a choice of benchmarks that fits the time."""
