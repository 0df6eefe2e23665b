"""How do united experts learn to stand in for the experts of their groups?"""
