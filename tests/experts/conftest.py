"""The cluster in one process that dispatch is tested with has expert hosts to ask."""

from tests.dispatch.conftest import cluster, unlinked_cluster

__all__ = ["cluster", "unlinked_cluster"]
