"""Simulated latencies beside those of a real suite, at loads that the simulator's costs were not fitted on."""
