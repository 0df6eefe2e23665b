"""What is one request, which KV blocks does it have, and how is its next token picked?"""
