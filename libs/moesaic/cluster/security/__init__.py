"""Who belongs to the cluster, and what may a caller do?"""
