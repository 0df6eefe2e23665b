"""Files of rows and requests: read, answered by a gateway, written."""
