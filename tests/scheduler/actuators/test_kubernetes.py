"""The actuator of Kubernetes, with a server that answers like the API server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moesaic.errors import InvalidInput, NotReady
from moesaic.messages.scaling import FleetShape
from moesaic.services.scheduler.scaling.actuators.kubernetes import KubernetesActuator
from tests.scheduler.actuators.fake_cluster import FakeCluster, certificate_in, cluster_in

MOST = FleetShape(3, 8)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    with cluster_in(tmp_path / "account") as cluster:
        yield cluster


def actuator_in(cluster: FakeCluster, *, ca_file: Path | None = None) -> KubernetesActuator:
    return KubernetesActuator(
        most=MOST,
        api_url=cluster.url,
        token_file=cluster.token_file,
        ca_file=ca_file or cluster.ca_file,
    )


async def test_a_side_without_workers_can_get_some_again(cluster: FakeCluster) -> None:
    actuator = actuator_in(cluster)

    for num_experts in (0, 0, 2):
        await actuator.apply(FleetShape(1, num_experts))

    assert cluster.patches == [("expert", 0), ("expert", 2)]


async def test_what_it_is_set_to_are_the_replicas_also_while_pods_are_missing(
    cluster: FakeCluster,
) -> None:
    cluster.replicas = {"attention": 0, "expert": 5}

    assert await actuator_in(cluster).intended() == FleetShape(0, 5)


async def test_a_number_is_told_again_when_somebody_else_was_faster(cluster: FakeCluster) -> None:
    cluster.num_conflicts = 2

    await actuator_in(cluster).apply(FleetShape(1, 3))

    assert cluster.replicas["expert"] == 3


async def test_a_fight_over_a_number_ends_with_an_error(cluster: FakeCluster) -> None:
    cluster.num_conflicts = 100

    with pytest.raises(NotReady, match="'expert' was changed by others"):
        await actuator_in(cluster).apply(FleetShape(1, 3))


async def test_a_token_that_was_replaced_is_read_anew(cluster: FakeCluster) -> None:
    actuator = actuator_in(cluster)
    await actuator.apply(FleetShape(2, 2))
    cluster.token = "second"

    with pytest.raises(NotReady, match="does not accept the token"):
        await actuator.apply(FleetShape(3, 2))
    cluster.token_file.write_text("second\n")
    await actuator.apply(FleetShape(3, 2))

    assert cluster.replicas["attention"] == 3


async def test_a_missing_right_is_told_with_what_to_bind(cluster: FakeCluster) -> None:
    cluster.may_scale = False

    with pytest.raises(InvalidInput, match="get and patch on deployments/scale"):
        await actuator_in(cluster).most()


async def test_a_deployment_that_is_not_there_is_told_by_its_setting(cluster: FakeCluster) -> None:
    del cluster.replicas["expert"]

    with pytest.raises(InvalidInput, match=r"Deployment 'expert' in namespace") as refused:
        await actuator_in(cluster).most()

    assert refused.value.field == "scaling_actuator"


async def test_a_server_of_another_authority_is_not_told_the_token(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    certificate_in(tmp_path / "other")

    with pytest.raises(NotReady, match="certificate is not trusted by"):
        await actuator_in(cluster, ca_file=tmp_path / "other/ca.crt").most()


async def test_outside_a_pod_the_missing_file_is_told(tmp_path: Path) -> None:
    actuator = KubernetesActuator(most=MOST, token_file=tmp_path / "token")

    with pytest.raises(NotReady, match="must run in a pod with a service account"):
        await actuator.most()


async def test_a_server_that_is_gone_is_told_with_its_address(cluster: FakeCluster) -> None:
    cluster.url = "https://127.0.0.1:1"

    with pytest.raises(NotReady, match=r"https://127\.0\.0\.1:1 cannot be reached"):
        await actuator_in(cluster).most()
