"""One replica of all non-expert weights, and the engine."""
