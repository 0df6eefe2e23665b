"""From requests to steps: KV blocks, batching, sampling, the step loop."""
