"""Which attention worker gets a request, and what does it answer?"""
