"""What of a request arrives at the engine: body bytes, JSON fields, headers. Compared with what was sent."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.children import BenchError, http_get, http_post
from tests.bench.figures import Figure, Target, skipped
from tests.bench.lineup import Lineup, System

HEADERS = (
    ("Content-Type", "application/json"),
    ("Accept", "*/*"),
    ("User-Agent", "meshd-bench/1"),
    ("OpenAI-Organization", "org-bench"),
    ("X-Request-Id", "bench-1"),
    ("X-Custom-Header", "kept, with spaces  inside"),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    body: bytes
    chunked: bool = False


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What a system did to a request; all empty: nothing."""

    identical: bool
    lost: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    headers_lost: frozenset[str] = frozenset()


def cases(model: str) -> list[Case]:
    """Requests a client may send: plain, with every kind of field and odd spelling, large, and chunked."""
    messages = [{"role": "user", "content": "hi"}]
    plain = json.dumps({"model": model, "messages": messages, "max_tokens": 1}).encode()
    odd = (
        '{ "stream" :false,\n "model":' + json.dumps(model) + ',"messages":[{"content":"\\u00e9 é \\u2028 🦙",'
        '"role":"user","x_part":1}],"temperature":0.70,"top_p":1e-0,"max_tokens":1,"seed":12345678901,'
        '"min_p":0.05,"top_k":40,"cache_prompt":true,"grammar":"root ::= \\"a\\"","repeat_penalty":1.10,'
        '"logit_bias":{"15043":1.0},"metadata":{"a":"b"},"x_unknown":{"deep":[1,2.50,null]},"user":"u"}  '
    ).encode()
    large = json.dumps({"model": model, "messages": [{"role": "user", "content": "long " * 200_000}]}).encode()
    return [
        Case(name="plain", body=plain),
        Case(name="odd", body=odd),
        Case(name="large", body=large),
        Case(name="chunked", body=odd, chunked=True),
    ]


def compare(sent: bytes, received: bytes, sent_headers: Sequence[str], received_headers: Sequence[str]) -> Difference:
    """Top-level fields lost, added and changed, and headers lost. Header names are compared without case."""
    ours = json.loads(sent)
    try:
        theirs = json.loads(received)
    except ValueError:
        theirs = None
    if not isinstance(theirs, dict):
        theirs = {}
    arrived = {name.lower() for name in received_headers}
    return Difference(
        identical=sent == received,
        lost=frozenset(ours.keys() - theirs.keys()),
        added=frozenset(theirs.keys() - ours.keys()),
        changed=frozenset(key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]),
        headers_lost=frozenset(name for name in sent_headers if name.lower() not in arrived),
    )


def words(difference: Difference) -> str:
    """The difference for people; empty when there is none."""
    parts = [
        ("lost", difference.lost),
        ("added", difference.added),
        ("changed", difference.changed),
        ("headers lost", difference.headers_lost),
    ]
    return "; ".join(f"{what} {' '.join(sorted(names))}" for what, names in parts if names)


def body_figures(running: Lineup, wanted: Sequence[str]) -> list[Figure]:
    """Per system: in how many cases the body arrives byte for byte, and how many fields and headers never arrive."""
    figures: list[Figure] = []
    names = [name for name in wanted if name != "direct"]
    for name in names:
        system = running.named(name)
        ours = name == "proxyd"
        total = len(cases("m"))
        targets = (Target("==", total), Target("==", 0), Target("==", 0)) if ours else (None, None, None)
        labels = (f"fast.body_identical.{name}", f"fast.fields_lost.{name}", f"fast.headers_lost.{name}")
        units = (f"of {total}", "fields", "headers")
        if system is None:
            if ours:
                why = f"{name}: not running"
                rows = zip(labels, units, targets, strict=True)
                figures += [skipped(label, unit, why, target) for label, unit, target in rows]
            continue
        seen = [_through(running, system, case) for case in cases(system.model)]
        merged = _merge([difference for difference, _ in seen if difference is not None])
        failed = "; ".join(fault for _, fault in seen if fault)
        values = (
            sum(1 for difference, _ in seen if difference is not None and difference.identical),
            len(merged.lost),
            len(merged.headers_lost),
        )
        whys = (failed or words(merged), "", "")
        figures += [
            Figure(name=label, unit=unit, value=float(value), target=target, why=why)
            for label, unit, value, target, why in zip(labels, units, values, targets, whys, strict=True)
        ]
    return figures


def _merge(differences: Sequence[Difference]) -> Difference:
    def union(field: str) -> frozenset[str]:
        return frozenset[str]().union(*(getattr(difference, field) for difference in differences))

    return Difference(
        identical=all(difference.identical for difference in differences),
        lost=union("lost"),
        added=union("added"),
        changed=union("changed"),
        headers_lost=union("headers_lost"),
    )


def _through(running: Lineup, system: System, case: Case) -> tuple[Difference | None, str]:
    """The difference of one case, or why there is none. Raises: BenchError when the stand-in can't be asked."""
    headers = [*HEADERS, *system.headers.items()]
    try:
        status, answer = http_post(system.port, "/v1/chat/completions", case.body, headers, chunked=case.chunked)
    except OSError as error:
        return None, f"{case.name}: {error}"
    if status != 200:
        return None, f"{case.name}: status {status} {answer[:80].decode(errors='replace')}"
    last = _last_received(running.engine_port)
    received = base64.b64decode(last["body_base64"])
    arrived = [name for name, _ in last["headers"]]
    return compare(case.body, received, [name for name, _ in HEADERS], arrived), ""


def _last_received(port: int) -> dict[str, Any]:
    try:
        status, body = http_get(port, "/_received?last=1")
        last: dict[str, Any] = json.loads(body)[0]
    except (OSError, ValueError, LookupError) as error:
        raise BenchError(f"the stand-in does not tell what it received: {error}") from error
    if status != 200:
        raise BenchError(f"the stand-in does not tell what it received: status {status}")
    return last
