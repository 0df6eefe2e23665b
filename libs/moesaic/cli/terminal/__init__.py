"""What do commands share at the terminal? Options, output, exit statuses."""
