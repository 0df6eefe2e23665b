"""A llama.cpp server. The peer's own Python runs this file: it needs nothing of ours, and ``xllamacpp``."""

import argparse
import os
import signal

import xllamacpp  # type: ignore[import-not-found]  # installed for that Python only


def main() -> None:
    """Serve a model over REST until ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    # Sequences at once
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--slot-tokens", type=int, required=True)
    parser.add_argument("--kv", choices=["f16", "f32"], required=True)
    asked = parser.parse_args()

    params = xllamacpp.CommonParams()
    params.model.path = asked.model
    params.port = asked.port
    params.n_parallel = asked.slots
    params.n_ctx = asked.slots * asked.slot_tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
    kv = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{asked.kv.upper()}")
    params.cache_type_k = params.cache_type_v = kv
    server = xllamacpp.Server(params)
    signal.pause()
    # It has run until here.
    del server


if __name__ == "__main__":
    main()
