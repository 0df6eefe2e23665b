"""What does the traffic activate? Counts of steps, their statistics, and recorded traces."""
