"""How does one batch of a node's rows reach the experts, instead of one batch of each worker?"""
