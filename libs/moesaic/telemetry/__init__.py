"""What is happening? Logs and metrics of a process."""
