"""What exchanging rows in two phases brings where nodes are joined by a slow link."""
