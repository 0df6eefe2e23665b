"""The generated curriculum of the demo checkpoint: a small world, told and asked about."""
