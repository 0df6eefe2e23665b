"""HF-format model directories: configuration, tokenizer, chat template, weights, layers.

This module imports nothing, so that a process without torch can use ``config``, ``tokenizer`` and
``chat``.
"""
