"""Typed identifiers. One word, one meaning; ids never travel as bare ``str`` inside the code."""

from __future__ import annotations

from typing import NewType

PeerId = NewType("PeerId", str)
"""libp2p peer id of a node, base58btc (``12D3KooW…``)."""
MeshId = NewType("MeshId", str)
ModelName = NewType("ModelName", str)
"""GGUF stem without part suffix; ``name@hash8`` when two files share a name."""
SlotId = NewType("SlotId", str)
"""One loading of one model; a reload gets a new slot id."""
HolderId = NewType("HolderId", str)
"""A process that holds credits on engines (one per proxyd worker or tunneld boot)."""
RequestId = NewType("RequestId", str)
InviteId = NewType("InviteId", str)
"""Random, 26 characters; names an invite without being able to redeem it."""
BootId = NewType("BootId", str)
"""One life of one daemon process."""

DAEMONS = ("gossipd", "electiond", "tunneld", "launcherd", "proxyd")
