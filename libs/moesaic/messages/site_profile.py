"""Profiles of edge agents, as they tell them to the scheduler."""

from typing import Annotated

import msgspec

from moesaic.messages.bounds import Amount, Count, Name


class PeerLink(msgspec.Struct, frozen=True, kw_only=True):
    """The link to one other site, as live messages and probes have shown it."""

    peer: Name  # worker id
    rtt_s: Amount
    bytes_per_s: Amount
    message_s: Amount = 0.0  # queue and computation there, of one message
    row_s: Amount = 0.0  # the same, of each of its rows


class SiteProfile(msgspec.Struct, frozen=True, kw_only=True, tag="site-profile.v1"):
    """One edge agent over one window.

    Choices are of this site's rows, by the place of their experts. Seconds are those beyond the local
    computation of the same time.
    """

    worker_id: Name
    generation: Count
    site: Name
    window_s: Amount
    memory_limit_bytes: Count = 0  # 0: none
    memory_used_bytes: Count = 0
    num_slots: Count = 0
    expert_bytes: Count = 0
    local: Count = 0  # choices
    cached: Count = 0
    loaded: Count = 0
    remote: Count = 0
    away_s: Amount = 0.0  # waiting for experts that have no slot here
    layers_s: Amount = 0.0  # experts of all layers, this wait included
    load_s: Amount = 0.0  # to read one expert from a file; 0: not known
    links: Annotated[list[PeerLink], msgspec.Meta(max_length=256)] = []
