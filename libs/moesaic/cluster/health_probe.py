"""The former name of ``moesaic.cluster.rpc.health_probe``, for compose files that still run it."""

from moesaic.cluster.rpc.health_probe import main

if __name__ == "__main__":
    main()
