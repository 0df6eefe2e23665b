"""Types of fields whose values can be computed with: decoders refuse all others.

A process that holds the secret may still be damaged, or of another version. So numbers are finite and
of a size that sums and other formats can hold, and names are short.
"""

from typing import Annotated

import msgspec

MOST = 1 << 53  # every integer up to here is a float, and fits into 64 bits with a sign

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
SmallCount = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
"""A number that is told over gRPC in 32 bits."""

Amount = Annotated[float, msgspec.Meta(ge=0, le=float(MOST))]
Number = Annotated[float, msgspec.Meta(ge=-float(MOST), le=float(MOST))]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

Name = Annotated[str, msgspec.Meta(max_length=256)]
