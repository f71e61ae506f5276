"""ADMIN streams over real connections. Each test quotes a rule of docs/spec/admin.md."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.tunneld.framing import OpeningReader, StreamType, encode_frame, encode_opening
from services.tunneld.io.admin import LINE_LIMIT, AdminDesk, ask_peer
from shared import codec
from shared.errors import RequestRefused, SchemaError
from shared.ids import PeerId
from shared.messages.daemon import Done
from shared.messages.models import LoadModel, UnloadModel
from shared.messages.trust import DrainNode, Grant
from shared.messages.tunnel import AdminAction, AdminReply, AdminRequest, PeerProbed, ProbeCheck
from tests.tunneld.bounded import bounded
from tests.tunneld.meshes import EndNode, TestMesh, end_nodes

MESH = TestMesh()


class Asked:
    """The asked node: its desk, and what its daemons were asked."""

    def __init__(self, node: EndNode, logs: Path, accepts: bool = True) -> None:
        self.accepts = accepts
        self.asked: list[tuple[str, codec.Message]] = []
        self.dialled: list[PeerId] = []
        self.desk = AdminDesk(node.peer_id, logs, self.ask, lambda: self.accepts, self.dial_back)
        self.node = node

    async def ask(self, daemon: str, request: codec.Message) -> codec.Message:
        self.asked.append((daemon, request))
        return Done()

    async def dial_back(self, peer_id: PeerId) -> PeerProbed:
        self.dialled.append(peer_id)
        return PeerProbed(checks=(ProbeCheck(name="tcp", level="ok", detail="answers"),))

    async def serve(self) -> None:
        connection, stream = await self.node.streams.get()
        opening = OpeningReader()
        while (head := opening.feed(await stream.read())) is None:
            pass
        assert head.type is StreamType.ADMIN
        await self.desk.serve(stream, opening.rest, connection.peer)


async def exchange(asker: EndNode, asked: Asked, request: AdminRequest) -> AdminReply | PeerProbed:
    connection = await asker.dial(asked.node)
    serving = asyncio.ensure_future(asked.serve())
    try:
        return await ask_peer(await connection.open_stream(), request)
    finally:
        await serving


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "gossipd.log").write_text("".join(f"line {number}\n" for number in range(5000)))
    (tmp_path / "secret.log").write_text("not for peers")
    return tmp_path


@bounded
async def test_an_issuer_may_read_logs_and_load_unload_drain(logs: Path) -> None:
    async with end_nodes("tcp", MESH.credentials(grant="issuer"), MESH.credentials()) as (asker, node):
        asked = Asked(node, logs)

        async def ask(action: AdminAction, subject: str, lines: int = 3) -> tuple[str, ...]:
            request = AdminRequest(peer=node.peer_id, action=action, subject=subject, lines=lines)
            answer = await exchange(asker, asked, request)
            assert isinstance(answer, AdminReply)
            return answer.lines

        assert await ask("logs", "gossipd") == ("line 4997", "line 4998", "line 4999")
        assert len(await ask("logs", "gossipd", 10**9)) == LINE_LIMIT
        assert await ask("logs", "gossipd", -1) == ()
        await ask("load", "tiny")
        await ask("unload", "tiny")
        await ask("unload", "")
        await ask("drain", "")
        await ask("drain", "off")
        assert asked.asked == [
            ("launcherd", LoadModel(model="tiny", wait=False)),  # type: ignore[arg-type]
            ("launcherd", UnloadModel(model="tiny", wait=False)),  # type: ignore[arg-type]
            ("launcherd", UnloadModel(model=None, wait=False)),
            ("gossipd", DrainNode(off=False)),
            ("gossipd", DrainNode(off=True)),
        ]


@pytest.mark.parametrize("grant", ["member", "client", "guest"])
@bounded
async def test_only_an_issuer_is_heard(grant: Grant, logs: Path) -> None:
    """Only a peer whose certificate has the grant `issuer` is heard."""
    async with end_nodes("quic", MESH.credentials(grant=grant), MESH.credentials()) as (asker, node):
        asked = Asked(node, logs)
        with pytest.raises(RequestRefused, match=f"needs an issuer's grant; .* has {grant}"):
            await exchange(asker, asked, AdminRequest(peer=node.peer_id, action="unload"))
        assert asked.asked == []


@bounded
async def test_the_owner_may_refuse_everybody(logs: Path) -> None:
    async with end_nodes("quic", MESH.credentials(grant="issuer"), MESH.credentials()) as (asker, node):
        asked = Asked(node, logs, accepts=False)
        with pytest.raises(RequestRefused, match=r"mesh\.accept_admin is false"):
            await exchange(asker, asked, AdminRequest(peer=node.peer_id, action="drain"))
        assert asked.asked == []


@pytest.mark.parametrize("grant", ["member", "client", "guest", "issuer"])
@bounded
async def test_any_peer_may_ask_to_be_dialled(grant: Grant, logs: Path) -> None:
    """The owner's refusal of other requests does not count for `probe`; who is dialled is the one who asks."""
    async with end_nodes("quic", MESH.credentials(grant=grant), MESH.credentials()) as (asker, node):
        asked = Asked(node, logs, accepts=False)
        answer = await exchange(asker, asked, AdminRequest(peer=node.peer_id, action="probe", subject="/ip4/10.0.0.1"))
        assert isinstance(answer, PeerProbed)
        assert answer.checks[0].detail == "answers"
        assert (asked.dialled, asked.asked) == ([asker.peer_id], [])


@pytest.mark.parametrize("subject", ["secret", "../gossipd", "gossipd.log", "", "/etc/passwd"])
@bounded
async def test_a_log_is_named_by_its_daemon_never_by_a_file(subject: str, logs: Path) -> None:
    async with end_nodes("tcp", MESH.credentials(grant="issuer"), MESH.credentials()) as (asker, node):
        with pytest.raises(RequestRefused, match="no daemon"):
            await exchange(asker, Asked(node, logs), AdminRequest(peer=node.peer_id, action="logs", subject=subject))


@bounded
async def test_a_request_for_another_node_is_refused(logs: Path) -> None:
    async with end_nodes("tcp", MESH.credentials(grant="issuer"), MESH.credentials()) as (asker, node):
        with pytest.raises(RequestRefused, match=f"this is {node.peer_id}"):
            await exchange(asker, Asked(node, logs), AdminRequest(peer=asker.peer_id, action="drain"))


@pytest.mark.parametrize("payload", [b"\xc1", b"", codec.encode(Done())])
@bounded
async def test_nonsense_is_refused(payload: bytes, logs: Path) -> None:
    async with end_nodes("tcp", MESH.credentials(grant="issuer"), MESH.credentials()) as (asker, node):
        asked = Asked(node, logs)
        stream = await (await asker.dial(node)).open_stream()
        await stream.write(encode_opening(StreamType.ADMIN, {}) + encode_frame(payload))
        if payload and payload != b"\xc1":
            await asked.serve()
        else:
            with pytest.raises(SchemaError):
                await asked.serve()
        assert asked.asked == []
