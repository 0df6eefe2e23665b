"""Reports of workers about their load and their costs; messages are in ``moesaic.messages.performance``."""

STREAM = "ctl:load"
KEPT = 4096  # reports in Redis, of all workers
REPORT_EVERY_S = 2.0
