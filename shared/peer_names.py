"""Which node a person means: by name, by id, or by a part of one as ``meshctl peers`` shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shared.errors import RequestRefused, SchemaError
from shared.ids import PeerId
from shared.messages.mesh import MemberChanged
from shared.peer_ids import public_key_of

SHORTEST_PART = 4
"""Characters of a peer id that may stand for all of it, if they are unique."""


def find_peer(text: str, names: Mapping[PeerId, str], *, unknown: bool = False) -> PeerId:
    """The peer that a person means by a name, an id, or a part of one as ``meshctl peers`` shows it.

    ``unknown``: a whole id is taken even if nobody here knows it. Raises: RequestRefused.
    """
    text = text.strip()
    named = [peer_id for peer_id, name in names.items() if name == text]
    found = named or [peer_id for peer_id in names if peer_id == text]
    if not found and len(text) >= SHORTEST_PART:
        start, _, end = text.partition("…")
        found = [
            peer_id
            for peer_id in names
            if (peer_id.startswith(start) and peer_id.endswith(end) if "…" in text else _is_part(text, peer_id))
        ]
    if len(found) == 1:
        return found[0]
    if len(found) > 1:
        ids = ", ".join(sorted(found)[:8])
        raise RequestRefused("ambiguous_peer", f"{text[:64]!r} could be {len(found)} nodes: {ids}; give a whole id")
    if unknown:
        try:
            public_key_of(text)
        except SchemaError:
            pass
        else:
            return PeerId(text)
    raise RequestRefused("no_such_peer", f"no node is called {text[:64]!r}; 'meshctl peers' lists names and ids")


def member_names(members: Iterable[MemberChanged]) -> dict[PeerId, str]:
    """The names to look in. One that is gone keeps its name only where no node that is there has it."""
    members = list(members)
    there = {
        item.announcement.peer_id: item.announcement.name for item in members if item.state in ("alive", "suspect")
    }
    taken = set(there.values())
    gone = [item.announcement for item in members if item.announcement.peer_id not in there]
    return {**{said.peer_id: "" if said.name in taken else said.name for said in gone}, **there}


def subjects_by_daemon(subject: str, names: Mapping[PeerId, str]) -> dict[str, str]:
    """What to ask tunneld and gossipd instead of ``subject``, if it means a node; empty when it means none, or several.

    tunneld knows nodes by their whole ids only, gossipd by their names too.
    """
    try:
        peer_id = find_peer(subject, names)
    except RequestRefused:
        return {}
    asked: dict[str, str] = {"tunneld": peer_id}
    if subject not in names.values():
        asked["gossipd"] = peer_id
    return asked


def _is_part(text: str, peer_id: PeerId) -> bool:
    return peer_id.startswith(text) or peer_id.endswith(text)
