"""Repair by comparing numbers: who holds what, what is to be sent, what is to be asked for. Stateless.

Source: docs/spec/membership.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from services.gossipd.records import NEVER, Held
from shared.ids import PeerId
from shared.messages.gossip import DigestEntry
from shared.messages.mesh import MemberState, SignedRecord

EXCHANGE_SECONDS = 10.0
EXCHANGE_PEERS = 3
DIGEST_ENTRIES = 1_100
"""Longer digests are refused: a mesh knows at most 1,000 nodes."""
BUNDLE_BYTES = 512 * 1024
"""Records go out in messages of about so much; a larger record goes alone."""


@dataclass(frozen=True, slots=True)
class Difference:
    """``newer_here``: whose records the other lacks; ``wanted``: whose records are newer there."""

    newer_here: tuple[PeerId, ...]
    wanted: tuple[PeerId, ...]


def entry(held: Held, state: MemberState) -> DigestEntry:
    load = held.load_number
    return DigestEntry(
        peer_id=held.announcement.peer_id,
        incarnation=held.announcement.incarnation,
        seq=held.announcement.seq,
        load_incarnation=max(0, load[0]),
        load_seq=max(0, load[1]),
        state=state,
    )


def compare(here: Mapping[PeerId, Held], there: Iterable[DigestEntry]) -> Difference:
    """What differs. Nodes that only one side knows count as newer there."""
    newer_here, wanted, named = [], [], set()
    for theirs in there:
        named.add(theirs.peer_id)
        held = here.get(theirs.peer_id)
        number = held.number if held else NEVER
        load = max(held.load_number, (0, 0)) if held else NEVER
        their_number = theirs.incarnation, theirs.seq
        their_load = theirs.load_incarnation, theirs.load_seq
        if their_number > number or their_load > load:
            wanted.append(theirs.peer_id)
        if held is not None and (number > their_number or load > their_load):
            newer_here.append(theirs.peer_id)
    newer_here += [peer_id for peer_id in here if peer_id not in named]
    return Difference(tuple(newer_here), tuple(wanted))


def bundles(records: Iterable[SignedRecord]) -> Iterator[tuple[SignedRecord, ...]]:
    """``records`` in pieces that fit into a message."""
    piece: list[SignedRecord] = []
    size = 0
    for record in records:
        if piece and size + len(record.payload) > BUNDLE_BYTES:
            yield tuple(piece)
            piece, size = [], 0
        piece.append(record)
        size += len(record.payload) + 200
    if piece:
        yield tuple(piece)
