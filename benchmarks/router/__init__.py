"""Costs and gains of the prefix router."""
