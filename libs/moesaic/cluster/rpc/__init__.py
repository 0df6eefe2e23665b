"""gRPC between services: servers, channels, errors, admin calls."""
