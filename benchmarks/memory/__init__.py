"""Does a suite take the memory that the plan says?"""
