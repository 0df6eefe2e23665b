"""``python -m services.expert``."""

from services.expert.main import main

main()
