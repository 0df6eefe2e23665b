"""Which way should a round go, by what links cost? (pure)"""
