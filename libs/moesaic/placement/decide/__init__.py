"""Which placement do the workers and operators call for, and may it be put in force?"""
