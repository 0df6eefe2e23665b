"""Which replica serves which expert of a batch? AEBS, the baselines it is compared with, and the exact optimum."""
