"""Who calls, and how much may they ask?"""
