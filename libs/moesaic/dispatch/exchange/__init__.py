"""How do a layer's rows and sums travel between attention nodes and expert nodes?"""
