"""What can I ask of it? The ``moesaic`` command, which starts without torch."""
