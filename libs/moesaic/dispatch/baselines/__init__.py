"""What are the ways of dispatch measured against?"""
