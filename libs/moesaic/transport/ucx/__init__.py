"""How do processes reach each other? Strangers at the door, the handshake, then UCX."""
