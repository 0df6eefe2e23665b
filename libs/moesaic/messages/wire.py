"""The form in which rows go to expert workers, and sums come back."""

from typing import Literal

WireDtype = Literal["own", "int8"]
