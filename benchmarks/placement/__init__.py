"""Quality of the placements that policies make."""
