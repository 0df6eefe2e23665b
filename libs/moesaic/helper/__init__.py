"""Helpers: who does work that may crash, not end, or fill the memory? A child process within limits."""
