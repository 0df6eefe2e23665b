"""How do rows and experts meet at the edge? Experts here compute, rows of others go to the cheapest holder."""
