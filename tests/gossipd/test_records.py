"""docs/spec/membership.md 2, 18."""

from __future__ import annotations

import pytest

from services.gossipd.records import ADDRESSES_LIMIT, NODES_LIMIT, Held, RecordStore, Refusal, signed_by_its_node
from shared.ids import MeshId, PeerId
from shared.messages.mesh import Announcement, SignedRecord
from tests.gossipd.gossip_net import MESH, Other

A, B = Other("a"), Other("b")


def code(result: object) -> str:
    return result.code if isinstance(result, Refusal) else "taken"


@pytest.fixture
def store() -> RecordStore:
    return RecordStore(Other("here").peer_id, MESH)


def test_02_only_the_key_inside_the_id_signs() -> None:
    assert signed_by_its_node(A.signed())
    assert not signed_by_its_node(SignedRecord(payload=b"x", signature=b"short", peer_id=A.peer_id))
    assert not signed_by_its_node(SignedRecord(payload=b"x", signature=bytes(64), peer_id=PeerId("nobody")))


def test_02_the_highest_number_wins(store: RecordStore) -> None:
    assert isinstance(store.take(A.signed(1, 5)), Announcement)
    assert code(store.take(A.signed(1, 4))) == "old"
    assert code(store.take(A.signed(2, 1))) == "taken"
    assert store.held[A.peer_id].number == (2, 1)
    assert code(store.take(A.sign(A.load(2, 1)))) == "taken"
    assert code(store.take(A.sign(A.load(2, 1)))) == "old"
    assert code(store.take(B.sign(B.load()))) == "old", "a load without its node"


def test_02_records_are_forwarded_as_they_came(store: RecordStore) -> None:
    signed, load = A.signed(), A.sign(A.load())
    store.take(signed)
    store.take(load)
    assert store.bundle([A.peer_id, B.peer_id]) == [signed, load]
    assert store.bundle([A.peer_id], loads_only=True) == [load]


def test_18_limits(store: RecordStore) -> None:
    assert code(store.take(A.signed(addresses=("/x",) * (ADDRESSES_LIMIT + 1)))) == "too_large"
    assert code(store.take(A.signed(name="n" * 300))) == "too_large"
    assert code(store.take(SignedRecord(payload=bytes(3_000_000), signature=b"", peer_id=A.peer_id))) == "too_large"
    assert code(store.take(A.signed(2**62, 1))) == "malformed"
    assert code(store.take(A.signed(-1, 1))) == "malformed"
    assert code(store.take(A.signed(mesh_id=MeshId("other")))) == "wrong_mesh"
    store.held = {PeerId(f"p{index}"): Held(A.signed(), A.announcement()) for index in range(NODES_LIMIT)}
    assert code(store.take(A.signed())) == "too_many"
