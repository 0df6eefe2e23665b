"""Differences of our layers to transformers."""
