"""How else could requests be routed? Policies of other servers, to compare with."""
