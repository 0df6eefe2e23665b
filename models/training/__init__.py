"""The making of the demo checkpoint in ``models/demo``: ``python -m models.training --help``."""
