"""At which thresholds does the next step run, and who is shed? Time is passed in, nothing is awaited."""
