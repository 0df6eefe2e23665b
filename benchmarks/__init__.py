"""One benchmark per claim of the README; ``moesaic bench`` runs them."""
