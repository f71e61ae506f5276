"""Where the inference port and the rest of proxyd meet: what :class:`InferenceApp` is given by its worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from services.proxyd.requests_log import RequestRecord
from shared.codec import Message
from shared.ids import ModelName, PeerId
from shared.messages.models import ModelPlaced

Headers = Sequence[tuple[bytes, bytes]]
"""As ASGI gives them: names in lower case, in order."""
Port = Literal["inference", "management"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that may not pass. ``code`` is stable, ``message`` says what, why and what to do next."""

    status: int
    code: str
    message: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


class AccessCheck(Protocol):
    """Host header, Origin and API key. Pure and fast: it is asked for every request."""

    def check(self, headers: Headers, port: Port) -> Refusal | None:
        """None when the request may pass."""
        ...

    def check_change(self, client_host: str, headers: Headers) -> Refusal | None:
        """The same for what changes the machine. ``client_host``: the other end's address, empty when unknown."""
        ...

    def preflight(self, headers: Headers, port: Port) -> list[tuple[bytes, bytes]] | None:
        """Headers of the 204 answer to a CORS preflight; None when the origin may not use this port."""
        ...

    def response_headers(self, headers: Headers, port: Port) -> list[tuple[bytes, bytes]]:
        """CORS headers for an answer to these request headers; usually none."""
        ...


class MetricsSink(Protocol):
    """Takes one finished record per request, and answers ``GET /metrics``."""

    def observe(self, record: RequestRecord) -> None: ...

    def active(self, delta: int) -> None: ...

    def render(self) -> tuple[bytes, bytes]:
        """(content type, body) in the Prometheus text format."""
        ...


Place = Callable[[ModelName, tuple[PeerId, ...]], Awaitable[ModelPlaced]]
"""Asks electiond where the model shall run; the second argument names nodes that were tried in vain.

Raises: RequestRefused, DaemonUnreachable."""
Idle = Callable[[], bool]
"""Whether the node has no ``mesh.toml``."""
AskLauncherd = Callable[[Message, float], Awaitable[Message]]
"""Asks launcherd; the second argument is the deadline in seconds. Raises: RequestRefused, DaemonUnreachable."""
