"""One benchmark per figure of docs/measured; ``moesaic bench`` runs them."""
