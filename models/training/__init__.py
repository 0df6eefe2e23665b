"""How the demo checkpoint in ``models/demo`` is made: ``python -m models.training --help``."""
