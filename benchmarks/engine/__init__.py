"""Speed of generation and prefill, beside other engines."""
