"""How many devices of which side would traffic need over time, and what would other ways to serve it need?"""
