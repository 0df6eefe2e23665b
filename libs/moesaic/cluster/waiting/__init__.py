"""How does a task wait: for the next attempt, or for the next change?"""
