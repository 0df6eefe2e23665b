"""Which worker should hold which expert? Pure decisions: records and numbers in, placements out."""
