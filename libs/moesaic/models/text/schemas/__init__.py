"""JSON schemas: what they allow, and what of it a grammar can hold."""
