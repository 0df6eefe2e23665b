"""Edge servers with little memory and tasks of their own: placements compared, and tasks that change places."""
