"""Where do the prompts of a load come from, and how long are their answers?"""
