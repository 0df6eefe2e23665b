"""How do several processes compute the attention of one instance? Tensor parallelism, led by the first rank."""
