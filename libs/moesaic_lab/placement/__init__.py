"""How good is a placement? Policies to compare with, and results of recorded traffic."""
