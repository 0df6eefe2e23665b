"""Time and memory of loading, against reading the files alone."""
