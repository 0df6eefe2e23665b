"""``python -m moesaic.kernels.native [DIR]``: compile ahead of time.

Without an argument for this machine; with one, for every kind of processor that this compiler knows,
into that directory (an image is built on one machine and runs on another).
"""

import sys
from pathlib import Path

from moesaic.kernels.native.library import VARIANTS, compile_into, library, this_variant

if len(sys.argv) > 1:
    for variant in VARIANTS if this_variant() != "any" else ["any"]:
        print(compile_into(Path(sys.argv[1]), variant))
elif library() is None:
    sys.exit(1)
