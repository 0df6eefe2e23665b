"""How do results look? Pictures of studies, for commands and benchmarks."""
