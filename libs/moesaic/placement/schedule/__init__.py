"""Which replica serves which expert of a batch? AEBS, and what goes before it."""
