"""Which tensors make up a matrix that is published quantised, and how are they read?"""
