"""The deployable services; none imports another."""
