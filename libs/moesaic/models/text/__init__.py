"""Text to tokens and back, and chat templates. Needs no torch."""
