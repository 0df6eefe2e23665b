"""How does the gateway speak HTTP? Bounds, bodies, errors, events."""
