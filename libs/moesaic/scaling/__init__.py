"""How many workers of each kind does the traffic need, and when do they come and go? Pure decisions."""
