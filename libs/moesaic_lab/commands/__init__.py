"""The commands that only studies need, by entry points of the group ``moesaic.commands``."""
