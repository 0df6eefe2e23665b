"""How is a suite started, watched and stopped?"""
