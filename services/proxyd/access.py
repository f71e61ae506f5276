"""Who may use the two ports: Host header, Origin, API key, console token. Pure, and asked for every request.

=====================  ================================================================================
any web page can make  ...so on both ports the Host header must name this node (else a name that an
a browser send here    attacker points at 127.0.0.1 would do: DNS rebinding) and the Origin must be this
                       node's own, or for inference one that ``api.allowed_origins`` names
other people can       ...so when there is an API key, inference needs one; and a bind that others can
reach a public bind    reach needs one even before the first key exists, unless configuration says not
anybody on the machine ...may read the management port; changing anything, or reading it from elsewhere,
                       needs the token that only this node's owner can read (``console_token``)
clients of Lemonade    ...may also download and delete models over the inference port: from this machine, not
                       through a proxy nor from a foreign page; from elsewhere with that token
=====================  ================================================================================

Source: DESIGN.md §8 (Host, Origin), TRAPS 36.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

from services.proxyd.interfaces import Headers, Port, Refusal
from shared.api_keys import KeyRing, verify_key

READ_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
CHALLENGE = ((b"www-authenticate", b'Bearer realm="meshd"'),)
EXPOSED_HEADERS = b"x-request-id, x-mesh-node, x-mesh-queue-ms, x-mesh-overhead-ms, x-mesh-attempts, retry-after"
REMEMBERED_HOSTS = 256
NONSENSE = ("", "")
NO_HOST = Refusal(status=400, code="host_missing", message="the request needs exactly one Host header")
WRONG_TOKEN = Refusal(
    status=401,
    code="invalid_token",
    message="the token is not this node's; it is in the file console_token of its MESH_HOME",
    headers=CHALLENGE,
)
FORWARDED_BY = frozenset((b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"))
"""A request with one of these came through a proxy, and its peer address says nothing of who sent it."""
HEADER_LIST_CHARS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_, ")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """What configuration and this machine say."""

    own_names: frozenset[str]
    """Host names and addresses of this node, lower case, IPv6 without brackets; loopback is always included."""
    own_ports: frozenset[int]
    """Of the API and the console: a page served by this node may use both."""
    allowed_hosts: frozenset[str] = frozenset()
    allowed_origins: frozenset[str] = frozenset()
    """``scheme://host[:port]``, or ``*``."""
    keys_always: bool = False
    """Others can reach the API and configuration does not allow that without keys."""


class Access:
    """The checks of one worker. ``keys`` gives the current key ring, ``token`` is the console token.

    The token is also good as an API key, so that ``meshctl chat`` works on a node that has keys.
    """

    def __init__(self, rules: AccessRules, keys: Callable[[], KeyRing], token: str) -> None:
        self._keys = keys
        self._token = token.encode()
        self.rules = rules

    @property
    def rules(self) -> AccessRules:
        return self._rules

    @rules.setter
    def rules(self, rules: AccessRules) -> None:
        self._rules = rules
        self._names = rules.own_names | frozenset(name.lower().rstrip(".") for name in rules.allowed_hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in rules.allowed_origins)
        self._own_ports = frozenset(str(port) for port in rules.own_ports)
        self._good_hosts: set[bytes] = set()

    def check(self, headers: Headers, port: Port) -> Refusal | None:
        """None when the request may pass: Host and Origin, and for inference the API key."""
        refusal = self.check_caller(headers, port)
        if refusal is None and port == "inference":
            refusal = self.check_key(headers)
        return refusal

    def check_caller(self, headers: Headers, port: Port) -> Refusal | None:
        """Host and Origin alone: what keeps web pages out."""
        host = origin = site = mode = None
        for name, value in headers:
            if name == b"host":
                if host is not None:
                    return NO_HOST
                host = value
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                site = value
            elif name == b"sec-fetch-mode":
                mode = value
        if not host:
            return NO_HOST
        if host not in self._good_hosts:
            if not self._is_own_name(split_authority(host)[0]):
                return Refusal(
                    status=403,
                    code="host_not_allowed",
                    message=f"{shown(host)!r} is not a name of this node. If you reach it by that name on purpose, add "
                    "the name to api.allowed_hosts in mesh.toml and run 'meshctl config reload'",
                )
            if len(self._good_hosts) >= REMEMBERED_HOSTS:
                self._good_hosts.clear()
            self._good_hosts.add(host)
        if origin is not None:
            if not self._origin_passes(origin, host, port):
                return self._foreign_page(origin, port)
        elif site == b"cross-site" and mode != b"navigate" and not (port == "inference" and self._origins):
            return self._foreign_page(b"another site", port)
        return None

    def check_key(self, headers: Headers) -> Refusal | None:
        """The API key of an inference request, if one is needed."""
        ring = self._keys()
        if not ring.required and not self._rules.keys_always:
            return None
        presented = presented_key(headers, b"x-api-key")
        if presented is None:
            return self._no_key(ring)
        if self._is_token(presented) or verify_key(ring, presented) is not None:
            return None
        if ring.problem:
            return Refusal(status=401, code="invalid_api_key", message=f"no API key can be checked: {ring.problem}")
        return Refusal(
            status=401,
            code="invalid_api_key",
            message="this API key is not valid here (mistyped, revoked, or another node's); "
            "'meshctl keys create' on the node makes one",
            headers=CHALLENGE,
        )

    def check_change(self, client_host: str, headers: Headers) -> Refusal | None:
        """A request on the inference port that :meth:`check` let pass and that changes the machine, as `pull` does.

        Source: docs/spec/lemonade.md.
        """
        tokens = [value.strip().decode("latin-1") for name, value in headers if name == b"x-mesh-token"]
        bearer = presented_key(headers, b"x-api-key")
        if any(self._is_token(presented) for presented in (*tokens, bearer or "")):
            return None
        if tokens:
            return WRONG_TOKEN
        near = is_loopback_address(client_host) and not any(name in FORWARDED_BY for name, _ in headers)
        if near and self.check_caller(headers, "management") is None:
            return None
        return Refusal(
            status=401,
            code="token_required",
            message="downloading and deleting models and changing limits is for programs on this machine; from "
            "elsewhere send 'X-Mesh-Token: TOKEN' with the contents of console_token in the node's MESH_HOME",
            headers=CHALLENGE,
        )

    def check_management(self, method: str, client_host: str, headers: Headers) -> Refusal | None:
        """A request on the management port. ``client_host`` is the other end's address, empty when unknown."""
        refusal = self.check_caller(headers, "management")
        if refusal is not None:
            return refusal
        presented = presented_key(headers, b"x-mesh-token")
        if presented is not None:
            if self._is_token(presented):
                return None
            return WRONG_TOKEN
        if method not in READ_METHODS:
            why = "changing something"
        elif not is_loopback_address(client_host):
            why = "reading this from another machine"
        else:
            return None
        return Refusal(
            status=401,
            code="token_required",
            message=f"{why} needs the node's token: send 'Authorization: Bearer TOKEN' with the contents of the file "
            "console_token in the node's MESH_HOME, or use meshctl on the node",
            headers=CHALLENGE,
        )

    def preflight(self, headers: Headers, port: Port) -> list[tuple[bytes, bytes]] | None:
        """Headers of the 204 answer to a CORS preflight; None when the page may not use this port."""
        if self.check_caller(headers, port) is not None:
            return None
        answer = self.response_headers(headers, port)
        if not answer:
            return None
        given = dict(headers)
        asked = given.get(b"access-control-request-headers", b"")
        if asked and HEADER_LIST_CHARS.issuperset(asked):
            answer.append((b"access-control-allow-headers", asked))
        answer.append((b"access-control-allow-methods", b"GET, POST, OPTIONS"))
        answer.append((b"access-control-max-age", b"600"))
        if given.get(b"access-control-request-private-network") == b"true":
            answer.append((b"access-control-allow-private-network", b"true"))
        return answer

    def response_headers(self, headers: Headers, port: Port) -> list[tuple[bytes, bytes]]:
        """CORS headers for an answer to these request headers; usually none."""
        host = origin = None
        for name, value in headers:
            if name == b"origin":
                origin = value
            elif name == b"host":
                host = value
        if origin is None or host is None or not self._origin_passes(origin, host, port):
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", EXPOSED_HEADERS),
            (b"vary", b"origin"),
        ]

    def _origin_passes(self, origin: bytes, host: bytes, port: Port) -> bool:
        scheme, _, authority = origin.lower().partition(b"://")
        if scheme in (b"http", b"https") and authority:
            # Same origin as the page that this very name served (also behind a TLS proxy), or our other port.
            if authority == host.lower():
                return True
            name, number = split_authority(authority)
            if number in self._own_ports and self._is_own_name(name):
                return True
        if port != "inference" or not self._origins:
            return False
        return "*" in self._origins or origin.decode("latin-1").lower().rstrip("/") in self._origins

    def _is_own_name(self, name: str) -> bool:
        return name in self._names or name == "localhost" or is_loopback_address(name)

    def _is_token(self, presented: str) -> bool:
        return bool(self._token) and hmac.compare_digest(self._token, presented.encode("utf-8", "surrogatepass"))

    def _foreign_page(self, origin: bytes, port: Port) -> Refusal:
        if port == "management":
            message = f"web pages of {shown(origin)!r} may not use this node's management port"
        else:
            message = (
                f"web pages of {shown(origin)!r} may not use this node. To allow it, add the origin to "
                "api.allowed_origins in mesh.toml and run 'meshctl config reload'"
            )
        return Refusal(status=403, code="origin_not_allowed", message=message)

    def _no_key(self, ring: KeyRing) -> Refusal:
        if ring.problem:
            message = f"no API key can be checked: {ring.problem}"
        elif ring.required:
            message = "this node wants an API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        else:
            message = (
                "other machines can reach this node, so it wants an API key, and none exists yet: run 'meshctl keys "
                "create' on the node and send 'Authorization: Bearer KEY', or set api.allow_public_without_keys"
            )
        return Refusal(status=401, code="invalid_api_key", message=message, headers=CHALLENGE)


def presented_key(headers: Headers, own_header: bytes) -> str | None:
    """The secret a request carries: ``Authorization: Bearer``, else ``own_header``; None without either."""
    other = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, rest = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return rest.strip().decode("latin-1")
        elif name == own_header:
            other = value.strip().decode("latin-1")
    return other


def split_authority(authority: bytes) -> tuple[str, str]:
    """``(name, port)`` of ``name[:port]`` in lower case, IPv6 without brackets; empty strings for nonsense."""
    text = authority.decode("latin-1").lower()
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            return NONSENSE
        try:
            name = str(ipaddress.IPv6Address(name))
        except ValueError:
            return NONSENSE
        port = rest[1:]
    else:
        name, _, port = text.partition(":")
        name = name.rstrip(".")
    if port and not (port.isascii() and port.isdigit()):
        return NONSENSE
    return name, port


def is_loopback_address(text: str) -> bool:
    """Whether ``text`` is an address that only this machine can have."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def shown(text: bytes) -> str:
    """A client's bytes, fit for an error message: printable, at most 100 characters."""
    return "".join(char if char.isprintable() else "?" for char in text[:100].decode("latin-1"))
