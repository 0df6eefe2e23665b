"""How is a classification asked of a language model, and how is its answer read?"""
