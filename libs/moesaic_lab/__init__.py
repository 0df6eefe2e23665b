"""What would happen, and what else could be done? Studies, baselines and exact optima, unknown to the product."""
