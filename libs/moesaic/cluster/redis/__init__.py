"""Control metadata over Redis."""
