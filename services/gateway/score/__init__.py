"""Questions that are answered by reading a prompt, not by writing."""
