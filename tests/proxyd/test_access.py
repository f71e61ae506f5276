"""Who may use the ports: DNS rebinding, foreign pages, API keys, the console token (TRAPS 36)."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.proxyd.access import Access, AccessRules, is_loopback_address, presented_key, split_authority
from shared import api_keys
from shared.api_keys import KeyRing

TOKEN = "t" * 64
RULES = AccessRules(
    own_names=frozenset(("192.168.1.5", "fe80::1", "desk", "desk.local")), own_ports=frozenset((9337, 3131))
)
KEY, KEY_TEXT = api_keys.new_key("k", random=bytes(api_keys.KEY_BYTES), now_unix_seconds=0)
RING = KeyRing(keys=(KEY,))


def access(rules: AccessRules = RULES, ring: KeyRing | None = None) -> Access:
    return Access(rules, lambda: ring or KeyRing(), TOKEN)


def head(host: str | None = "127.0.0.1:9337", **others: str) -> list[tuple[bytes, bytes]]:
    pairs = [] if host is None else [(b"host", host.encode())]
    return pairs + [(name.replace("_", "-").encode(), value.encode()) for name, value in others.items()]


def code(refusal: object) -> str | None:
    return None if refusal is None else str(getattr(refusal, "code"))  # noqa: B009 (a Refusal or None)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:9337",
        "localhost.",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.8.9.1",
        "[::1]:9337",
        "[0:0:0:0:0:0:0:1]",
        "192.168.1.5:9337",
        "[fe80::1]:9337",
        "desk",
        "Desk.Local:80",
    ],
)
def test_names_of_this_node_pass(host: str) -> None:
    for port in ("inference", "management"):
        assert access().check(head(host), port) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:9337",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "user@localhost",
        "localhost:80:80",
        "[::1",
        "[::1]x",
        "[::2]",
        "192.168.1.6",
        "localhost:9337x",
        "0.0.0.0:9337",
        "2130706433",
        "localhost\u2024com",
    ],
)
def test_a_name_an_attacker_can_point_here_is_refused(host: str) -> None:
    """DNS rebinding: the address is ours, the name is not."""
    for port in ("inference", "management"):
        refusal = access().check(head(host), port)  # type: ignore[arg-type]
        assert refusal is not None
        assert (refusal.status, refusal.code) == (403, "host_not_allowed")
        assert "api.allowed_hosts" in refusal.message


def test_exactly_one_host_header_is_needed() -> None:
    for headers in (head(None), head(""), head() + head()):
        assert code(access().check(headers, "inference")) == "host_missing"


def test_a_configured_name_passes_and_a_reload_takes_it_away() -> None:
    rules = AccessRules(own_names=frozenset(), own_ports=frozenset((1,)), allowed_hosts=frozenset(("Mesh.Example",)))
    door = access(rules)
    assert door.check(head("mesh.example:443"), "inference") is None
    door.rules = RULES
    assert code(door.check(head("mesh.example:443"), "inference")) == "host_not_allowed"


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://evil.example:9337",
        "http://127.0.0.1:5000",
        "http://localhost",
        "file://",
        "http://127.0.0.1:9337.evil.example",
        "chrome-extension://abc",
        "",
        "http://",
    ],
)
def test_a_foreign_page_is_refused_on_both_ports(origin: str) -> None:
    for port in ("inference", "management"):
        refusal = access().check(head(origin=origin), port)  # type: ignore[arg-type]
        assert refusal is not None, origin
        assert (refusal.status, refusal.code) == (403, "origin_not_allowed")
        assert access().preflight(head(origin=origin), port) is None  # type: ignore[arg-type]
        assert access().response_headers(head(origin=origin), port) == []  # type: ignore[arg-type]


def test_pages_of_this_node_may_use_both_ports() -> None:
    for origin in ("http://127.0.0.1:3131", "http://localhost:9337", "http://[::1]:3131", "http://192.168.1.5:3131"):
        assert access().check(head(origin=origin), "inference") is None
        assert access().check(head(origin=origin), "management") is None
    behind_tls = AccessRules(own_names=frozenset(), own_ports=frozenset(), allowed_hosts=frozenset(("mesh.example",)))
    assert access(behind_tls).check(head("mesh.example", origin="https://mesh.example"), "management") is None


def test_an_allowed_origin_may_use_inference_only() -> None:
    rules = AccessRules(
        own_names=frozenset(), own_ports=frozenset((9337,)), allowed_origins=frozenset(("https://chat.example",))
    )
    door = access(rules)
    headers = head(origin="https://chat.example")
    assert door.check(headers, "inference") is None
    assert code(door.check(headers, "management")) == "origin_not_allowed"
    assert code(door.check(head(origin="https://chat.example.evil"), "inference")) == "origin_not_allowed"
    assert (b"access-control-allow-origin", b"https://chat.example") in door.response_headers(headers, "inference")
    assert door.response_headers(headers, "management") == []
    asked = [*headers, (b"access-control-request-headers", b"authorization, x-stainless-os")]
    answer = door.preflight(asked, "inference")
    assert answer is not None
    assert (b"access-control-allow-headers", b"authorization, x-stainless-os") in answer
    garbled = door.preflight([*headers, (b"access-control-request-headers", b"a\r\nset-cookie: x")], "inference")
    assert garbled is not None
    assert not any(b"set-cookie" in value for _, value in garbled)


def test_any_origin_when_configuration_says_so() -> None:
    door = access(AccessRules(own_names=frozenset(), own_ports=frozenset(), allowed_origins=frozenset(("*",))))
    assert door.check(head(origin="https://anything.example"), "inference") is None
    assert code(door.check(head(origin="https://anything.example"), "management")) == "origin_not_allowed"


def test_a_cross_site_fetch_without_an_origin_is_refused_but_a_link_works() -> None:
    silent = head(sec_fetch_site="cross-site", sec_fetch_mode="no-cors")
    assert code(access().check(silent, "management")) == "origin_not_allowed"
    assert code(access().check(silent, "inference")) == "origin_not_allowed"
    link = head(sec_fetch_site="cross-site", sec_fetch_mode="navigate")
    assert access().check(link, "management") is None


def test_keys_are_needed_once_there_is_one() -> None:
    assert access().check(head(), "inference") is None
    door = access(ring=RING)
    assert code(door.check(head(), "inference")) == "invalid_api_key"
    assert door.check(head(authorization=f"Bearer {KEY_TEXT}"), "inference") is None
    assert door.check(head(authorization=f"bearer  {KEY_TEXT}"), "inference") is None
    assert door.check(head(x_api_key=KEY_TEXT), "inference") is None
    assert door.check(head(authorization=f"Bearer {TOKEN}"), "inference") is None
    for wrong in ("Bearer ", f"Basic {KEY_TEXT}", f"Bearer {KEY_TEXT}0", f"Bearer {KEY.sha256}", "Bearer é"):
        refusal = door.check(head(authorization=wrong), "inference")
        assert refusal is not None, wrong
        assert refusal.status == 401
        assert KEY_TEXT not in refusal.message
    assert (b"www-authenticate", b'Bearer realm="meshd"') in (door.check_key(head()) or pytest.fail("passed")).headers


def test_a_web_page_is_refused_before_its_key_is_looked_at() -> None:
    door = access(ring=RING)
    headers = head(origin="https://evil.example", authorization=f"Bearer {KEY_TEXT}")
    assert code(door.check(headers, "inference")) == "origin_not_allowed"


def test_unreadable_keys_close_the_door() -> None:
    door = access(ring=KeyRing(problem="cannot read the file"))
    refusal = door.check(head(authorization=f"Bearer {KEY_TEXT}"), "inference")
    assert refusal is not None
    assert "cannot read the file" in refusal.message


def test_a_public_bind_wants_a_key_even_before_the_first_exists() -> None:
    """Revoking the last key must not open a node to the network."""
    rules = AccessRules(own_names=frozenset(), own_ports=frozenset(), keys_always=True)
    refusal = access(rules).check(head(), "inference")
    assert refusal is not None
    assert "meshctl keys create" in refusal.message


def test_management_changes_need_the_token_and_reads_this_machine_or_the_token() -> None:
    door = access()
    assert door.check_management("GET", "127.0.0.1", head()) is None
    assert door.check_management("GET", "::ffff:127.0.0.1", head()) is None
    for method, client in (("POST", "127.0.0.1"), ("DELETE", "::1"), ("GET", "192.168.1.9"), ("GET", "")):
        assert code(door.check_management(method, client, head())) == "token_required"
        assert door.check_management(method, client, head(authorization=f"Bearer {TOKEN}")) is None
        assert door.check_management(method, client, head(x_mesh_token=TOKEN)) is None
        assert code(door.check_management(method, client, head(x_mesh_token=KEY_TEXT))) == "invalid_token"


def test_a_token_does_not_excuse_a_foreign_page() -> None:
    headers = head(origin="https://evil.example", x_mesh_token=TOKEN)
    assert code(access().check_management("POST", "127.0.0.1", headers)) == "origin_not_allowed"


def test_an_empty_token_is_no_token() -> None:
    door = Access(RULES, lambda: RING, "")
    assert code(door.check_management("POST", "127.0.0.1", head(x_mesh_token=""))) == "invalid_token"
    assert code(door.check(head(x_api_key=""), "inference")) == "invalid_api_key"


@given(st.binary(max_size=300))
def test_hostile_bytes_never_raise(data: bytes) -> None:
    door = access(ring=RING)
    for name in (b"host", b"origin", b"authorization", b"x-api-key"):
        headers = [(b"host", b"localhost")] if name != b"host" else []
        door.check([*headers, (name, data)], "inference")
        door.preflight([*headers, (name, data)], "inference")
    split_authority(data)
    presented_key([(b"authorization", data)], b"x-api-key")


def test_what_is_echoed_is_printable() -> None:
    refusal = access().check([(b"host", b"\x1b[31mevil\r\n" + b"x" * 500)], "inference")
    assert refusal is not None
    assert refusal.message.isprintable()
    assert len(refusal.message) < 400


def test_loopback_addresses() -> None:
    assert [is_loopback_address(text) for text in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "10.0.0.1", "x", "")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_check_costs_microseconds() -> None:
    door = access(ring=RING)
    headers = head(
        authorization=f"Bearer {KEY_TEXT}", accept="*/*", content_type="application/json", user_agent="x" * 40
    )
    started = time.perf_counter()
    for _ in range(2000):
        door.check(headers, "inference")
    assert (time.perf_counter() - started) / 2000 < 100e-6


HERE, THERE = "127.0.0.1", "192.168.1.77"


@pytest.mark.parametrize(
    ("client", "headers", "expected"),
    [
        (HERE, {}, None),
        ("::1", {}, None),
        (HERE, {"authorization": f"Bearer {KEY_TEXT}"}, None),
        (THERE, {}, "token_required"),
        ("", {}, "token_required"),
        (THERE, {"authorization": f"Bearer {KEY_TEXT}"}, "token_required"),
        (THERE, {"x_mesh_token": TOKEN}, None),
        (THERE, {"authorization": f"Bearer {TOKEN}"}, None),
        (THERE, {"authorization": f"Bearer {KEY_TEXT}", "x_mesh_token": TOKEN}, None),
        (HERE, {"x_mesh_token": "guess"}, "invalid_token"),
        (HERE, {"x_forwarded_for": THERE}, "token_required"),
        (HERE, {"forwarded": f"for={THERE}"}, "token_required"),
        (HERE, {"via": "1.1 proxy"}, "token_required"),
        (HERE, {"x_forwarded_for": THERE, "x_mesh_token": TOKEN}, None),
        (HERE, {"origin": "https://chat.example"}, "token_required"),
        (HERE, {"origin": "http://127.0.0.1:9337"}, None),
        (HERE, {"origin": "https://chat.example", "x_mesh_token": TOKEN}, None),
    ],
)
def test_what_changes_the_machine_is_for_programs_on_it(
    client: str, headers: dict[str, str], expected: str | None
) -> None:
    """docs/spec/lemonade.md 23: a loopback peer, no proxy's headers, no foreign page; from elsewhere the token."""
    rules = AccessRules(
        own_names=RULES.own_names, own_ports=RULES.own_ports, allowed_origins=frozenset(("https://chat.example",))
    )
    assert code(access(rules, RING).check_change(client, head(**headers))) == expected
