"""Which prompts begin alike: the names of KV blocks."""
