"""Prompts that are only read: gathered experts against synchronous expert parallelism."""
