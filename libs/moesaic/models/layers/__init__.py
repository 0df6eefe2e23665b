"""The layers of a decoder, and one forward pass through them."""
