"""Seconds of each part of a step on this machine, at the shapes of published models."""

from benchmarks.costs.bench import run as run
