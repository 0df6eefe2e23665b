"""When do workers of the two sides come and go? The controller around ``moesaic.scaling``."""
