"""Plugins: commands and policies that other packages add, by entry points of the groups ``moesaic.<kind>``."""

from functools import cache
from importlib.metadata import EntryPoint, entry_points


@cache
def plugins(kind: str) -> dict[str, EntryPoint]:
    """List what installed packages add of a kind, by name; ``load()`` brings one.

    | kind | loads |
    |---|---|
    | ``commands`` | a Typer application |
    | ``placement_policies`` | a ``placement.policies.Policy`` |
    | ``expert_schedulings`` | an ``experts.assignment.Choose`` |
    | ``router_policies`` | a class of ``prefix.policy.Policy`` |
    """
    found = entry_points(group=f"moesaic.{kind}")
    return {each.name: each for each in sorted(found, key=lambda each: each.name)}
