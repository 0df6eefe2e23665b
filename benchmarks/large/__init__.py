"""A real model's shape with random weights of 4 bits: the same in our form and in llama.cpp's."""
