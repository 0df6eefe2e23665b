"""Parts that several benchmarks need: suites, clients, recorded traces."""
