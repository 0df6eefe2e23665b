"""How good is a placement on steps that were recorded?"""
