"""REST in, answers out."""
