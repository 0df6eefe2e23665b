"""How do tensors move? Frames, authenticated links, and the networks that carry them."""
