"""What does a model directory say its model is? Needs no torch."""
