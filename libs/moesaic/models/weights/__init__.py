"""Where are the weights, and are they whole?"""
