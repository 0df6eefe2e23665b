"""``python -m moesaic.services.edge_agent``, and ``moesaic-edge-agent``."""

from moesaic.cluster.start import start_service
from moesaic.services.edge_agent.settings import EdgeAgentSettings


def main() -> None:
    """Run an edge agent."""
    start_service(EdgeAgentSettings, "moesaic.services.edge_agent.main")


if __name__ == "__main__":
    main()
