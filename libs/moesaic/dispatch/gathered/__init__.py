"""How do the experts of a layer come to its rows, while other layers compute?"""
