"""Which placement would serve the traffic better, and when is it worth asking?"""
