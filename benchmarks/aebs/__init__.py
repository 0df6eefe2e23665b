"""Evenness of activated experts over instances."""
