"""The node's HTTP service, as any client would use it. Standard library only: commands must start fast."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from shared.errors import MeshError, RequestRefused

CONNECT_SECONDS = 5.0
"""Also for the headers of quick requests."""
WAIT_SECONDS = 3600.0
"""A request may wait as long as its model needs to load; the node decides when to give up."""


class HttpFailed(MeshError):
    """The node's HTTP service cannot be reached, or the answer ended early."""

    code = "http_failed"


def answers(url: str) -> bool:
    """Whether ``GET url`` gives 200 soon."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=CONNECT_SECONDS)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def chat_events(api_url: str, body: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    """Stream a chat completion: one dict per event.

    Raises: RequestRefused with the node's own words, HttpFailed.
    """
    parts = urlsplit(api_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=WAIT_SECONDS)
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _refusal(response.status, response.read())
        complete = False
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                complete = True
                break
            event = _json(data)
            if "error" in event:
                raise _refusal(200, data)
            yield event
        if not complete:
            raise HttpFailed("the answer ended early: the connection was closed before its end; try again")
    except (OSError, http.client.HTTPException) as error:
        raise HttpFailed(f"the HTTP service at {api_url} broke off: {error}; see 'meshctl status'") from error
    finally:
        connection.close()


def _refusal(status: int, data: bytes) -> RequestRefused:
    error = _json(data).get("error")
    if isinstance(error, dict):
        return RequestRefused(str(error.get("code") or error.get("type") or status), str(error.get("message") or error))
    return RequestRefused(f"http_{status}", f"HTTP {status}: {data[:300].decode(errors='replace')}")


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
