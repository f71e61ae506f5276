from __future__ import annotations

from services.gossipd.anti_entropy import BUNDLE_BYTES, bundles, compare, entry
from services.gossipd.records import Held
from shared.messages.mesh import SignedRecord
from tests.gossipd.gossip_net import Other

A, B, C = Other("a"), Other("b"), Other("c")


def held(other: Other, incarnation: int, seq: int, load_seq: int = 0) -> Held:
    made = Held(other.signed(incarnation, seq), other.announcement(incarnation, seq))
    if load_seq:
        made.load = other.load(incarnation, load_seq)
        made.signed_load = other.sign(made.load)
    return made


def test_equal_digests_mean_nothing_to_do() -> None:
    here = {A.peer_id: held(A, 2, 3), B.peer_id: held(B, 1, 1, 9)}
    difference = compare(here, [entry(item, "alive") for item in here.values()])
    assert difference.newer_here == difference.wanted == ()


def test_each_side_gets_what_is_newer_on_the_other() -> None:
    here = {A.peer_id: held(A, 2, 3), B.peer_id: held(B, 1, 1, 9)}
    there = [entry(held(A, 2, 4), "alive"), entry(held(B, 1, 1, 8), "alive"), entry(held(C, 1, 1), "dead")]
    difference = compare(here, there)
    assert difference.newer_here == (B.peer_id,)
    assert difference.wanted == (A.peer_id, C.peer_id)
    assert compare(here, []).newer_here == (A.peer_id, B.peer_id)


def test_bundles_fit_into_messages() -> None:
    records = [SignedRecord(payload=bytes(100_000), signature=b"", peer_id=A.peer_id)] * 12
    pieces = list(bundles(records))
    assert sum(len(piece) for piece in pieces) == 12
    assert all(sum(len(item.payload) for item in piece) <= BUNDLE_BYTES for piece in pieces)
    large = SignedRecord(payload=bytes(2_000_000), signature=b"", peer_id=A.peer_id)
    assert [len(piece) for piece in bundles([large, large])] == [1, 1]
