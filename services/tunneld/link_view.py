"""What is said about a link: its state and reason in words, and when a change is worth saying."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.tunneld.link import Connected, Link, Preference
from shared.messages.tunnel import LinkChanged, LinkState, StreamCounters
from shared.multiaddrs import Transport

REPORT_SECONDS = 10.0
"""Counters are published at most so often."""
RTT_CHANGE = 0.2
"""A round trip is published again when it changed by more than this share."""


def view_link(link: Link, preference: Preference, *, now: float) -> LinkChanged:
    """The link as it is now."""
    control, bulk = link.choose(preference, bulk=False), link.choose(preference, bulk=True)
    retry_at = min((turn.next_at for turn in link.rounds.values() if turn.next_at is not None), default=None)
    state, reason = _state(link, control, bulk)
    rtts = [link.rtts[key] for key in link.connections if key in link.rtts]
    waits = retry_at is not None and state == "waiting"
    return LinkChanged(
        peer_id=link.peer_id,
        state=state,
        reason=reason,
        grant=link.grant,
        control=control.transport if control else "",
        bulk=bulk.transport if bulk else "",
        remote_address=bulk.remote if bulk else "",
        dialled_here=control.dialled_here if control else False,
        rtt_seconds=min(rtts, default=None),
        retry_in_seconds=round(max(0.0, retry_at - now), 3) if waits and retry_at is not None else None,
        counters=sum_counters((link.ended, *(link.counted.get(key, StreamCounters()) for key in link.connections))),
    )


def _state(link: Link, control: Connected | None, bulk: Connected | None) -> tuple[LinkState, str]:
    if control is not None and bulk is not None:
        who = "dialled from here" if control.dialled_here else "dialled by the peer"
        words = f"control over {transport_word(control.transport)}, bulk over {transport_word(bulk.transport)}, {who}"
        missing = [f"no {transport_word(name)}: {turn.reason}" for name, turn in link.rounds.items() if turn.reason]
        return "connected", "; ".join([words, *missing])
    if not link.wanted:
        return "closed", link.lost_reason or "nobody needs it"
    if any(turn.flying for turn in link.rounds.values()):
        return "connecting", link.lost_reason or "dialling it"
    reasons = [turn.reason for turn in link.rounds.values() if turn.reason]
    return "waiting", "; ".join(reasons) or link.lost_reason or "about to be dialled"


def worth_saying(old: LinkChanged, new: LinkChanged, age_seconds: float) -> bool:
    """Whether ``new`` tells what ``old``, said ``age_seconds`` ago, did not."""
    if replace(old, rtt_seconds=None, counters=StreamCounters(), retry_in_seconds=None) != replace(
        new, rtt_seconds=None, counters=StreamCounters(), retry_in_seconds=None
    ):
        return True
    before, after = old.rtt_seconds, new.rtt_seconds
    if (before is None) != (after is None):
        return True
    if before is not None and after is not None and abs(after - before) > RTT_CHANGE * max(before, 0.001):
        return True
    return old.counters != new.counters and age_seconds >= REPORT_SECONDS


def sum_counters(parts: Iterable[StreamCounters]) -> StreamCounters:
    total = StreamCounters()
    for part in parts:
        total = StreamCounters(
            bytes_sent=total.bytes_sent + part.bytes_sent,
            bytes_received=total.bytes_received + part.bytes_received,
            streams_opened=total.streams_opened + part.streams_opened,
            streams_accepted=total.streams_accepted + part.streams_accepted,
            refused=total.refused + part.refused,
        )
    return total


def transport_word(transport: Transport) -> str:
    return "QUIC" if transport == "quic" else "TCP"
