"""Orders that outlive a scheduler: what all of them have in common."""

import msgspec

from moesaic.messages.bounds import Count


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """An order of operators, or of the scheduler itself.

    Attributes:
        version: seconds since 1970 when it was given, or the version before plus one, if that is more; 0 is the order
            that the scheduler was started with.
    """

    version: Count = 0
