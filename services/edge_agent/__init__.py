"""An edge server's whole share: non-expert modules, gate, some experts, and the way to those of other sites."""
