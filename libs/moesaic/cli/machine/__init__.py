"""What does this machine offer, and which suite runs in this directory? Cores, ports, disk, state."""
