"""Times of every kernel against the limits of a GPU."""
