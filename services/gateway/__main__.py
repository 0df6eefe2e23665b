"""``python -m services.gateway``."""

import gc

gc.disable()  # while all this is imported: none of it is garbage, and looking takes a fifth of the start

from services.gateway.main import main  # noqa: E402

main()
