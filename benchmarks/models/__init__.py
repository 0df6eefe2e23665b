"""Every family in every topology, number format and quantisation: right, in memory as planned, and how fast."""
