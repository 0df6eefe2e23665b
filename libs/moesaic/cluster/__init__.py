"""How is control shared? gRPC, the bus over Redis, the registry and the life of a process."""

import os

# Failures reach our callers as errors; gRPC's own lines on standard error would only repeat them.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
