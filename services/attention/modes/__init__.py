"""How do rows and experts meet? A mode is a file that plans and opens it, and its line in ``table``."""
