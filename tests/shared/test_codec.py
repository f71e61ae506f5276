"""Messages to bytes and back: golden bytes, every registered message, hostile bytes, caps."""

from __future__ import annotations

import dataclasses
import json
import types
from typing import Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import codec
from shared.errors import SchemaError, UnknownTag
from shared.ids import BootId, HolderId, MeshId, ModelName, PeerId, SlotId
from shared.messages.daemon import DaemonInfo, Done, GetStory, Heartbeat, Refused, Snapshot
from shared.messages.leases import CreditUse, ReportCredits
from shared.messages.mesh import Announcement, MemberChanged, RecordSigned, ServedModel, SignedRecord, SignRecord
from shared.messages.models import InventoryChanged, SkippedFile, SlotChanged
from shared.messages.registry import REGISTRY, message

GOLDEN = [
    (Heartbeat(), "92a948656172746265617480"),
    (
        Refused(code="idle", detail="é", retry_after_seconds=1.5),
        "92a75265667573656483a4636f6465a469646c65a664657461696ca2c3a9b372657472795f61667465725f7365636f6e6473cb3ff800"
        "0000000000",
    ),
    (
        Snapshot(boot_id=BootId("b1"), seq=300, items=(b"\x01",)),
        "92a8536e617073686f7483a7626f6f745f6964a26231a3736571cd012ca56974656d7391c40101",
    ),
    (GetStory(), "92a847657453746f727981a56c696d697464"),
    (
        SlotChanged(
            slot_id=SlotId("s1"),
            model=ModelName("qwen"),
            type="llm",
            state="ready",
            reason="loaded in 2.1 s",
            origin="flag",
            need_bytes=5_000_000_000,
            pid=7,
            port=8080,
            parallel=4,
            load_seconds=2.1,
        ),
        "92ab536c6f744368616e676564de0013a7736c6f745f6964a27331a56d6f64656ca47177656ea474797065a36c6c6da57374617465a5"
        "7265616479a6726561736f6eaf6c6f6164656420696e20322e312073a66f726967696ea4666c6167aa6e6565645f6279746573cf0000"
        "00012a05f200a370696407a4706f7274cd1f90a8706172616c6c656c04a6696e5f75736500a777616974696e6700ae636f6e74657874"
        "5f746f6b656e7300ae72657175657374735f746f74616c00a8726573746172747300b173746174655f6167655f7365636f6e6473cb00"
        "00000000000000b46c6173745f7573655f6167655f7365636f6e6473cb0000000000000000ac6c6f61645f7365636f6e6473cb4000cc"
        "cccccccccda86c6f675f70617468a0",
    ),
    (
        MemberChanged(
            announcement=Announcement(
                peer_id=PeerId("12D3KooWx"),
                incarnation=3,
                seq=9,
                mesh_id=MeshId("m"),
                version="0.1.0",
                name="desk",
                role="host",
                state="active",
                addresses=("/ip4/10.0.0.2/udp/9340/quic-v1/p2p/12D3KooWx",),
                vram_bytes=8_000_000_000,
                hosted=(ServedModel(model=ModelName("qwen"), type="llm", parallel=4),),
            ),
            state="alive",
            reason="this node",
            is_self=True,
        ),
        "92ad4d656d6265724368616e67656485ac616e6e6f756e63656d656e748fa7706565725f6964a9313244334b6f6f5778ab696e636172"
        "6e6174696f6e03a373657109a76d6573685f6964a16da776657273696f6ea5302e312e30a46e616d65a46465736ba4726f6c65a4686f"
        "7374a57374617465a6616374697665a961646472657373657391d92c2f6970342f31302e302e302e322f7564702f393334302f717569"
        "632d76312f7032702f313244334b6f6f5778a6646576696365a3637075aa7672616d5f6279746573cf00000001dcd65000b061766169"
        "6c61626c655f6d6f64656c7390a773657276696e6790a6686f737465649184a56d6f64656ca47177656ea474797065a36c6c6da87061"
        "72616c6c656c04a4706c616ea0b07265717565737465645f6d6f64656c7390a57374617465a5616c697665a6726561736f6ea9746869"
        "73206e6f6465a769735f73656c66c3ab6167655f7365636f6e6473cb0000000000000000",
    ),
    (
        ReportCredits(
            holder=HolderId("h"),
            daemon="proxyd",
            pid=5,
            uses=(
                CreditUse(
                    slot_id=SlotId("s1"),
                    model=ModelName("qwen"),
                    credits=4,
                    in_use=1,
                    started_total=10,
                    last_use_age_seconds=0.25,
                ),
            ),
        ),
        "92ad5265706f72744372656469747384a6686f6c646572a168a66461656d6f6ea670726f787964a370696405a4757365739187a7736c"
        "6f745f6964a27331a56d6f64656ca47177656ea76372656469747304a6696e5f75736501ad737461727465645f746f74616c0ab46c61"
        "73745f7573655f6167655f7365636f6e6473cb3fd0000000000000a777616974696e6700",
    ),
    (SignRecord(payload=b"\x00\xff"), "92aa5369676e5265636f726481a77061796c6f6164c40200ff"),
]


def covers(new: Any, old: Any) -> bool:
    """``new`` says all that ``old`` says; only keys may have been added."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(key in new and covers(new[key], value) for key, value in old.items())
    if isinstance(old, list):
        return isinstance(new, list) and len(new) == len(old) and all(map(covers, new, old))
    return bool(new == old)


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=lambda value: type(value).__name__)
def test_golden_bytes_keep_their_meaning(message: Any, golden: str) -> None:
    """New fields have defaults, meanings never change; plain msgpack reads every message."""
    data = bytes.fromhex(golden)
    assert codec.decode(data) == message
    old, new = msgpack.unpackb(data), msgpack.unpackb(codec.encode(message))
    assert covers(new, old), f"{type(message).__name__} is encoded with another meaning: {new}"


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a message field's type; a type that this does not know fails the test."""
    if isinstance(hint, NewType):
        return values_of(hint.__supertype__)
    if dataclasses.is_dataclass(hint):
        return messages_of(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        assert args[1:] == (Ellipsis,), hint
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    if origin in (Union, types.UnionType):
        return st.one_of([values_of(arg) for arg in args])
    return {
        str: st.text(max_size=20),
        bytes: st.binary(max_size=20),
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        type(None): st.none(),
    }[hint]


def messages_of(cls: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.builds(cls, **{field.name: values_of(hints[field.name]) for field in dataclasses.fields(cls)})


ANY_MESSAGE = st.sampled_from(sorted(REGISTRY)).flatmap(lambda tag: messages_of(REGISTRY[tag]))


@pytest.mark.parametrize("tag", sorted(REGISTRY))
def test_every_message_survives_the_round_trip(tag: str) -> None:
    @settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(messages_of(REGISTRY[tag]))
    def round_trip(message: Any) -> None:
        data = codec.encode(message)
        assert codec.decode(data) == message
        read = msgpack.unpackb(data)
        assert read[0] == tag
        assert set(read[1]) == {field.name for field in dataclasses.fields(message)}
        json.dumps(codec.to_jsonable(message))

    round_trip()


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_raise_only_schema_error(data: bytes) -> None:
    try:
        codec.decode(data)
    except SchemaError:
        pass


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(ANY_MESSAGE, st.data())
def test_mutated_messages_raise_only_schema_error(message: Any, data: st.DataObject) -> None:
    encoded = bytearray(codec.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(encoded)))
    for hostile in (bytes(encoded), bytes(encoded[:cut]), bytes(encoded) + b"\x00"):
        try:
            codec.decode(hostile)
        except SchemaError:
            pass


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(REGISTRY)), st.data())
def test_right_keys_with_wrong_values_raise_only_schema_error(tag: str, data: st.DataObject) -> None:
    names = [field.name for field in dataclasses.fields(REGISTRY[tag])]
    fields = {name: data.draw(PLAIN) for name in names}
    try:
        codec.from_fields(tag, fields)
    except SchemaError:
        pass


def test_an_unknown_tag_is_told_apart_from_nonsense() -> None:
    with pytest.raises(UnknownTag, match="FromTheFuture"):
        codec.decode(msgpack.packb(["FromTheFuture", {}]))


def test_unknown_keys_are_ignored_and_missing_ones_refused() -> None:
    assert codec.decode(msgpack.packb(["Done", {"detail": "ok", "colour": "blue"}])) == Done(detail="ok")
    with pytest.raises(SchemaError, match=r"Refused: detail"):
        codec.decode(msgpack.packb(["Refused", {"code": "x"}]))


@pytest.mark.parametrize(
    "value",
    [[], ["Done"], ["Done", {}, 1], {"Done": {}}, "Done", ["Done", []], [1, {}], [["Done"], {}], None],
    ids=repr,
)
def test_another_shape_than_tag_and_fields_is_refused(value: Any) -> None:
    with pytest.raises(SchemaError):
        codec.decode(msgpack.packb(value))


def test_maps_with_keys_that_are_no_text_are_refused() -> None:
    for fields in ({1: 2}, {b"detail": "x"}):
        with pytest.raises(SchemaError):
            codec.decode(msgpack.packb(["Done", fields]))


def test_both_directions_are_capped_in_size() -> None:
    room = codec.MAX_MESSAGE_BYTES - len(codec.encode(SignRecord(payload=b"")))
    assert codec.decode(codec.encode(SignRecord(payload=bytes(room - 10)))) == SignRecord(payload=bytes(room - 10))
    with pytest.raises(SchemaError, match="over the limit"):
        codec.encode(SignRecord(payload=bytes(room + 10)))
    with pytest.raises(SchemaError, match="over the limit"):
        codec.decode(msgpack.packb(["SignRecord", {"payload": bytes(room + 10)}]))


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def test_nesting_is_capped() -> None:
    assert codec.unpack(msgpack.packb(nested(codec.MAX_NESTING))) == nested(codec.MAX_NESTING)
    for hostile in (msgpack.packb(nested(codec.MAX_NESTING + 1)), b"\x91" * 1_000_000, b"\x81\xa0" * 100_000):
        with pytest.raises(SchemaError):
            codec.unpack(hostile)


@pytest.mark.parametrize(
    "hostile",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\xdf\xff\xff\xff\xff",  # a map of 4 billion
        b"\xdb\xff\xff\xff\xff",  # 4 GiB of text
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\xd6\xff\x00\x00\x00\x00",  # an extension: a timestamp
        b"\xc1",  # never used in msgpack
        b"",
    ],
    ids=bytes.hex,
)
def test_claimed_sizes_and_foreign_kinds_are_refused_at_once(hostile: bytes) -> None:
    with pytest.raises(SchemaError):
        codec.unpack(hostile)


def test_an_error_about_foreign_bytes_stays_short() -> None:
    """The answer to a hostile message must fit into a message."""
    fields = codec.to_fields(
        DaemonInfo(name="x", pid=1, version="1", boot_id=BootId("b"), uptime_seconds=1.0, state="", counters={"a": 1})
    )[1]
    with pytest.raises(SchemaError) as caught:
        codec.from_fields("DaemonInfo", {**fields, "counters": {"k" * 1_000_000: "no number"}})
    assert len(caught.value.detail) <= codec.DETAIL_CHARACTERS


def test_what_msgpack_cannot_carry_is_a_schema_error() -> None:
    stray = InventoryChanged(models=(), skipped=(SkippedFile(path="stray-\udcff", reason="name"),))
    for unsendable in (stray, GetStory(limit=2**64)):
        with pytest.raises(SchemaError, match="cannot be sent"):
            codec.encode(unsendable)


def test_bytes_are_base64_in_json() -> None:
    record = SignedRecord(payload=b"\xff\xfe", signature=b"\x00", peer_id=PeerId("p"))
    assert codec.to_jsonable(RecordSigned(record=record)) == {
        "record": {"payload": "__4=", "signature": "AA==", "peer_id": "p"}
    }


def test_only_registered_messages_are_sent_and_a_tag_has_one_meaning() -> None:
    with pytest.raises(TypeError, match="not a registered message"):
        codec.encode(SkippedFile(path="x", reason="y"))
    with pytest.raises(TypeError, match="declared twice"):
        message(type("Done", (), {"__annotations__": {}}))
