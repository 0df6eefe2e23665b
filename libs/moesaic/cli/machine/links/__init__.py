"""How are agents on one machine kept apart? Namespaces, joined by links of a set rate and delay."""
