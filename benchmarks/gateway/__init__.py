"""Costs of the gateway."""
