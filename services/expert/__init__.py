"""Expert slots, the gate, and grouped experts."""
