"""Which share of the work stays exact while demand exceeds what workers can serve? Pure decisions."""
