"""JSON schemas: the values that they allow, and the part that a grammar can enforce."""
