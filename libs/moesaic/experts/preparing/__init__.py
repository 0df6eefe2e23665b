"""How do the experts of a placement get here?"""
