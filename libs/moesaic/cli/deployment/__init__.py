"""Which service runs on which host of a cluster, and how is it started there?"""
