"""How do processes of one host reach each other without the system's help? Memory that both map."""
