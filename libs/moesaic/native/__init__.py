"""What is written in C, and how is it compiled and called?"""
