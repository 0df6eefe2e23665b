"""Owns the placement and its epoch."""
