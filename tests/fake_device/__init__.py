"""A device for tests that says ``cuda`` and computes on the CPU.

``fake_device()`` gives it for the length of a block, to all threads of the process. Tensors of it
refuse what tensors of a GPU refuse, and memory and streams are watched: see ``rules`` and ``clocks``.
"""
