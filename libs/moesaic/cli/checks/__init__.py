"""Is this machine fit to run a suite, and may this suite start?"""
