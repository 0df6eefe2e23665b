"""The fake device in every process of a suite: Python runs this at its start, where this folder is in PYTHONPATH."""

import atexit
import os
import sys

_COMPUTE_NOTHING = ("gateway", "scheduler", "redis")
_command = " ".join(sys.orig_argv)

if "moesaic" in _command and not any(name in _command for name in _COMPUTE_NOTHING):
    os.environ.setdefault("TRITON_INTERPRET", "1")

    import pytest

    from moesaic.cli.suite import devices
    from moesaic.experts import costs, warm_up
    from tests.fake_device.cuda import fake_device
    from tests.fake_device.parcels import let_ucx_take_the_device

    devices._DRIVERS = ("/",)
    # Interpreted kernels take a minute for what a GPU does in a moment.
    costs._ROWS, costs._ROUNDS, costs._MOST_EXPERTS = (1, 2, 3), 1, 2
    warm_up.MOST_WORKERS, warm_up.WarmUp.run.__defaults__ = 2, (2,)
    let_ucx_take_the_device(pytest.MonkeyPatch())
    _device = fake_device(devices=2)
    _device.__enter__()
    atexit.register(_device.__exit__, None, None, None)
