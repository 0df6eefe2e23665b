"""How is load made, and what does it measure?"""
