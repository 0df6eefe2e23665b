"""Many requests from a file of JSON lines: read, answered, written in order, resumed. No sockets here."""
