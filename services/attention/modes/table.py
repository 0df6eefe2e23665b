"""The modes by the values of ``--dispatch``.

Each plans before the process listens, opens once the decoder is loaded, and starts once the worker
has its lease; see ``contract``.
"""

from collections.abc import Mapping

from moesaic.services.attention.modes.all_to_all import plan_all_to_all
from moesaic.services.attention.modes.contract import PlanMode
from moesaic.services.attention.modes.gathered import plan_gathered
from moesaic.services.attention.modes.local import plan_local
from moesaic.services.attention.modes.routed import plan_routed

MODES: Mapping[str, PlanMode] = {
    "local": plan_local,
    "routed": plan_routed,
    "gathered": plan_gathered,
    "all-to-all": plan_all_to_all,
}
