"""The management port's routes about the mesh: invites, joining, leaving, draining, who takes part. gossipd decides.

A token comes in a body and leaves in one answer; it is in no path, log or error. An idle node gets its ``mesh.toml``
before it invites or joins, as with ``meshctl``.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, Field

from services.proxyd.io.node_queries import NodeQueries
from shared import codec
from shared.ids import InviteId
from shared.messages.trust import (
    BanPeer,
    CreateInvite,
    DrainNode,
    Grant,
    InviteCreated,
    JoinChanged,
    JoinMesh,
    LeaveMesh,
    ListInvites,
    RevokeInvite,
    TrustPeer,
    WhoAmI,
)

READ_SECONDS = 2.0
DECIDE_SECONDS = 20.0
"""A mesh may have to be made first, or a goodbye said."""
JOIN_SECONDS = 60.0
"""Connecting, verifying and being admitted; tunneld gives up on an address after seconds."""
TOKEN_CHARACTERS = 64 * 1024
NAME_CHARACTERS = 400

MESH_ROUTES = (
    ("GET", "/api/mesh/whoami", "this node's id, mesh, grant and addresses"),
    ("GET", "/api/mesh/invites", "the invites of this node, without their secrets"),
    ("GET", "/api/mesh/join", "the newest join, step by step"),
    ("POST", "/api/mesh/invite", "make an invite; the answer has its token (token)"),
    ("POST", "/api/mesh/invites/{invite_id}/revoke", "make an invite useless (token)"),
    ("POST", "/api/mesh/join", "join the mesh that the body's token invites to (token)"),
    ("POST", "/api/mesh/leave", "leave the mesh (token)"),
    ("POST", "/api/mesh/drain", "take no new requests, or take them again (token)"),
    ("POST", "/api/mesh/peers/ban", "cut a node off, or take that back (token)"),
    ("POST", "/api/mesh/peers/trust", "let a guest take part like a member (token)"),
)

NodeName = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS)]


class InviteBody(BaseModel):
    grant: Grant = "member"
    expires_seconds: float = Field(default=24 * 3600.0, gt=0, allow_inf_nan=False)
    uses: int = Field(default=1, ge=1)


class JoinBody(BaseModel):
    token: str = Field(min_length=1, max_length=TOKEN_CHARACTERS, repr=False)
    client: bool = False
    switch: bool = False


class DrainBody(BaseModel):
    off: bool = False
    node: NodeName | None = None
    """Another node, by name or id; needs an issuer's grant."""


class BanBody(BaseModel):
    peer: NodeName
    lift: bool = False


class TrustBody(BaseModel):
    peer: NodeName


def add_mesh_routes(app: FastAPI, queries: NodeQueries) -> None:
    """``MESH_ROUTES``, on ``app``. The gate in front has checked the token of every POST."""

    async def asked(message: codec.Message, seconds: float = DECIDE_SECONDS) -> Any:
        return codec.to_jsonable(await queries.ask("gossipd", message, deadline_seconds=seconds))

    @app.get("/api/mesh/whoami")
    async def whoami() -> Any:
        return await asked(WhoAmI(), READ_SECONDS)

    @app.get("/api/mesh/invites")
    async def invites() -> Any:
        return await asked(ListInvites(), READ_SECONDS)

    @app.get("/api/mesh/join")
    async def join_steps() -> Any:
        messages = await queries.snapshot("gossipd")
        join = next((item for item in messages if isinstance(item, JoinChanged)), JoinChanged())
        return codec.to_jsonable(join)

    @app.post("/api/mesh/invite")
    async def invite(body: InviteBody) -> Any:
        await queries.configure()
        request = CreateInvite(grant=body.grant, expires_seconds=body.expires_seconds, uses=body.uses)
        made = await queries.ask("gossipd", request, deadline_seconds=DECIDE_SECONDS)
        assert isinstance(made, InviteCreated)
        return {"token": made.token, "invite": codec.to_jsonable(made)["invite"]}

    @app.post("/api/mesh/invites/{invite_id}/revoke")
    async def revoke(invite_id: str) -> Any:
        return await asked(RevokeInvite(invite_id=InviteId(invite_id[:NAME_CHARACTERS])))

    @app.post("/api/mesh/join")
    async def join(body: JoinBody) -> Any:
        await queries.configure(client=body.client)
        return await asked(JoinMesh(token=body.token, client=body.client, switch=body.switch), JOIN_SECONDS)

    @app.post("/api/mesh/leave")
    async def leave() -> Any:
        return await asked(LeaveMesh())

    @app.post("/api/mesh/drain")
    async def drain(body: DrainBody) -> Any:
        peer_id = await queries.other_node(body.node)
        if peer_id is not None:
            return await queries.ask_node(peer_id, "drain", "off" if body.off else "")
        return await asked(DrainNode(off=body.off))

    @app.post("/api/mesh/peers/ban")
    async def ban(body: BanBody) -> Any:
        return await asked(BanPeer(peer=body.peer, lift=body.lift))

    @app.post("/api/mesh/peers/trust")
    async def trust(body: TrustBody) -> Any:
        return await asked(TrustPeer(peer=body.peer))
