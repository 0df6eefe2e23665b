"""``python -m services.scheduler``."""

from services.scheduler.main import main

main()
