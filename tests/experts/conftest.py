"""The cluster in one process that dispatch is tested with has expert hosts to ask, and kernels their launches."""

from tests.dispatch.conftest import cluster, unlinked_cluster
from tests.kernels.conftest import device, gpu, launches

__all__ = ["cluster", "device", "gpu", "launches", "unlinked_cluster"]
