"""Which rows does the next step compute? Pure: events in, decisions out."""
