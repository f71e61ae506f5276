"""API keys: nothing but the whole key passes, and nothing but its hash is kept."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import api_keys
from shared.api_keys import KeyNotFound, KeyRing, add_key, from_document, new_key, revoke_key, to_document, verify_key
from shared.errors import StateError


def ring_of(*names: str) -> tuple[KeyRing, list[str]]:
    ring, texts = KeyRing(), []
    for number, name in enumerate(names):
        key, text = new_key(name, random=bytes([number]) * api_keys.KEY_BYTES, now_unix_seconds=1.5)
        ring = add_key(ring, key)
        texts.append(text)
    return ring, texts


def test_a_key_is_prefix_id_secret_and_only_its_hash_is_kept() -> None:
    ring, (text,) = ring_of("laptop")
    prefix, key_id, secret = text.split("-")
    assert (prefix, key_id, len(secret)) == ("mesh", "00000000", 64)
    assert secret not in json.dumps(to_document(ring))


def test_each_key_verifies_as_itself_and_nothing_else_does() -> None:
    ring, texts = ring_of("a", "b", "c")
    assert [verify_key(ring, text) for text in texts] == list(ring.keys)
    for wrong in ("", "mesh-", texts[0][:-1], texts[0] + "0", texts[0].upper(), texts[0].split("-")[2], "ключ"):
        assert verify_key(ring, wrong) is None


@given(st.text(max_size=120))
def test_random_text_never_passes(text: str) -> None:
    ring, _ = ring_of("a", "b")
    assert verify_key(ring, text) is None


def test_a_revoked_key_is_refused_and_the_others_stay() -> None:
    ring, texts = ring_of("a", "b")
    smaller, key = revoke_key(ring, "a")
    assert key.name == "a"
    assert verify_key(smaller, texts[0]) is None
    assert verify_key(smaller, texts[1]) is not None
    assert revoke_key(ring, ring.keys[1].id)[1].name == "b"


def test_revoking_needs_one_clear_key() -> None:
    ring, _ = ring_of("twin", "twin", "")
    with pytest.raises(KeyNotFound, match="2 keys are named"):
        revoke_key(ring, "twin")
    with pytest.raises(KeyNotFound, match="meshctl keys list"):
        revoke_key(ring, "nobody")
    with pytest.raises(KeyNotFound):
        revoke_key(ring, "")


def test_keys_are_required_once_there_are_any_or_they_cannot_be_read() -> None:
    assert not KeyRing().required
    assert ring_of("a")[0].required
    assert KeyRing(problem="unreadable").required


def test_the_document_round_trips() -> None:
    ring, _ = ring_of("a", "b")
    assert from_document(json.loads(json.dumps(to_document(ring)))) == ring


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"keys": {}},
        {"keys": [1]},
        {"keys": [{"id": "x"}]},
        {"keys": [{"id": "x", "sha256": "short"}]},
        {"keys": [{"id": 5, "sha256": "0" * 64}]},
    ],
)
def test_a_broken_document_is_an_error_not_an_empty_ring(document: object) -> None:
    with pytest.raises(StateError):
        from_document(document)


def test_a_name_that_would_garble_a_list_is_refused() -> None:
    for name in ("x" * 65, "two\nlines", "\x1b[31m"):
        with pytest.raises(StateError):
            new_key(name, random=bytes(api_keys.KEY_BYTES), now_unix_seconds=0)
