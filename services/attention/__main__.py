"""``python -m services.attention``."""

from services.attention.main import main

main()
