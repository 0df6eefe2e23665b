"""Moesaic: Mixture-of-Experts serving as small, independently deployable services."""

__version__ = "0.1.0"
