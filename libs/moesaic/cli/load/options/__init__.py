"""What can be asked of ``moesaic bench serve``, in the words of ``vllm bench serve``?"""
