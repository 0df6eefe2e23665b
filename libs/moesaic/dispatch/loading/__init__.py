"""How do experts come into the slots of a worker: from a peer, or from the checkpoint?"""
