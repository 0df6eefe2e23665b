"""Messages between services: their version, and the form in which rows and sums travel."""

from typing import Literal

# Of frames, gRPC calls and entries in Redis. It grows when an older service could not read what a newer one says;
# a new field that others pass over changes nothing. docs/operate/upgrading.md says what a growth asks of operators.
PROTOCOL = 1

WireDtype = Literal["own", "int8"]
