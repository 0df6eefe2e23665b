"""How do workers come and go? One interface, and the means behind it."""
