"""What can I ask of it? The ``moesaic`` command. Nothing here imports torch when the command starts."""
