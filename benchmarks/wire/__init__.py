"""Which bytes do rows and sums take between attention and expert workers, and what do fewer cost?"""
