"""What may callers send?"""
