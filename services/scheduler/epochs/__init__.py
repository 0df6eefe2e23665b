"""How a placement comes into force."""
