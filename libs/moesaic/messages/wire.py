"""The form in which rows go to expert workers, and sums come back."""

from typing import Literal

WireDtype = Literal["own", "int8"]

WireSetting = Literal["own", "int8", "auto"]
"""``auto``: whichever makes rows wait less, by measured links."""
