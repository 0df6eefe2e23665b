"""What ``moesaic doctor`` says of RDMA, by UCX's own description of what it has."""

import pytest
from ucxx._lib import libucxx

from moesaic.cli.checks.machine_checks import check_rdma, compare_rdma

WITHOUT = """
#     component 0  :  self
#     component 1  :  tcp
#
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
"""
WITH = WITHOUT.replace("#\n", "#     component 4  :  ib\n#\n", 1)
USABLE = WITH + "#      resource 5  :  md 4  dev 3  flags -- rc_mlx5/mlx5_0:1\n"


@pytest.mark.parametrize(
    ("devices", "ucx", "status", "says"),
    [
        ([], WITHOUT, "ok", "no RDMA devices; UCX is without InfiniBand"),
        ([], WITH, "ok", "no RDMA devices; UCX is with InfiniBand"),
        (["mlx5_0"], WITHOUT, "warn", "mlx5_0; UCX is without InfiniBand"),
        (["mlx5_0"], WITH, "warn", "mlx5_0; UCX has InfiniBand and can use none of them"),
        (["mlx5_0", "mlx5_1"], USABLE, "ok", "UCX can use rc_mlx5/mlx5_0:1"),
        (["mlx5"], USABLE, "warn", "mlx5; UCX has InfiniBand and can use none of them"),
    ],
)
def test_devices_are_compared_with_what_ucx_can_use(
    devices: list[str], ucx: str, status: str, says: str
) -> None:
    found = compare_rdma(devices, ucx)

    assert (found.status, found.detail) == (status, says)
    assert bool(found.fix) == (status != "ok")


def test_the_description_of_the_ucx_here_is_understood() -> None:
    info = libucxx.UCXContext().info

    assert "component 0" in info
    assert compare_rdma(
        ["lo"], info.replace("component 0  :  self", "component 0  :  ib")
    ).detail == ("UCX can use tcp/lo")
    assert check_rdma().name == "rdma"
