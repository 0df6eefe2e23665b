"""How good is a schedule? Ways to choose among replicas to compare AEBS with, and the exact optimum."""
