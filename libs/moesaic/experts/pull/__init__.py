"""How does a worker get packed experts from another one?"""
