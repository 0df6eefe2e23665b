"""How hidden states meet experts, behind one interface: ``local`` and ``routed``."""
