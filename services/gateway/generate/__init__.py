"""Answers that grow token by token, from the fields of a request to the bytes of a reply."""
