"""What callers get."""
