"""services.gossipd.io: whole gossipds founding, inviting, joining, banning, renewing; real files, real buses."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from services.gossipd.io.authority_files import AuthorityFiles
from shared import codec
from shared.certificates import make_csr
from shared.errors import CertificateRefused, RequestRefused, StateError
from shared.ids import MeshId
from shared.io import log
from shared.messages.daemon import Done
from shared.messages.trust import (
    BanPeer,
    CreateInvite,
    DrainNode,
    Grant,
    InitMesh,
    InviteCreated,
    InviteList,
    JoinMesh,
    LeaveMesh,
    ListInvites,
    MeshJoined,
    NodeIdentity,
    RenewCertificate,
    RevokeInvite,
    TrustPeer,
    TrustStatement,
    WhoAmI,
)
from shared.messages.tunnel import FromPeer
from tests.gossipd.trust_net import WAIT_SECONDS, Net, TrustNode, refuses
from tests.waiting import run_async, until

DAY_SECONDS = 86_400.0
GRANTS_ASKED: tuple[Grant, ...] = ("issuer", "member")


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What the gossipds of the test log."""
    stream = io.StringIO()
    log.use_stream(stream)
    yield stream
    log.use_stream(sys.stdout)
    print(stream.getvalue())


def play(home: Path, scene: Callable[[Net], Awaitable[None]]) -> None:
    async def run() -> None:
        async with Net(home) as net:
            await scene(net)

    run_async(run(), 40.0)


async def token_of(node: TrustNode, grant: Grant = "member", uses: int = 1) -> str:
    made = await node.ask(CreateInvite(grant=grant, uses=uses), InviteCreated)
    return made.token


async def joined(net: Net, issuer: TrustNode, name: str, grant: Grant = "member") -> TrustNode:
    """A new node, admitted by ``issuer`` and connected to it."""
    node = await net.add(name)
    token = await token_of(issuer, grant)
    await node.ask(JoinMesh(token=token), MeshJoined)
    await until(lambda: node.trust.chain_der, WAIT_SECONDS, f"{name} trusts")
    net.connect(issuer, node)
    return node


def mesh_of(node: TrustNode) -> MeshId:
    return node.daemon.membership.identity.mesh_id


async def in_mesh(node: TrustNode, mesh_id: MeshId) -> None:
    await until(lambda: mesh_of(node) == mesh_id, WAIT_SECONDS, f"{node.name} is in {mesh_id}")


def test_two_commands_make_a_mesh(mesh_home: Path, logged: io.StringIO) -> None:
    async def scene(net: Net) -> None:
        one, two = await net.add("one"), await net.add("two")
        before = one.trust
        assert before.chain_der == (), "starting a node makes no keys"
        assert not AuthorityFiles(one.paths.state).credentials_path.exists()
        token = await token_of(one)
        made = await two.ask(JoinMesh(token=token), MeshJoined)
        assert (made.mesh_id, made.grant, made.already) == (before.mesh_id, "member", False), "a mesh keeps its id"
        await in_mesh(two, made.mesh_id)
        (known,) = two.daemon.desk.bootstrap
        assert (known.peer_id, known.addresses) == (one.peer_id, (one.address,)), "whom to dial first"
        assert two.daemon.membership.own is not None
        assert two.daemon.membership.own.mesh_id == made.mesh_id, "announced without a restart"
        await until(lambda: two.trust.mesh_id == made.mesh_id, WAIT_SECONDS, "two trusts")
        net.connect(one, two)
        steps = ["token", "connect", "verify", "admitted", "peers", "assigned"]
        await until(lambda: [step.name for step in two.joins[-1].steps] == steps, WAIT_SECONDS, "every step was told")
        assert two.joins[-1].steps[-1].state == "done"
        (invite,) = (await one.ask(ListInvites(), InviteList)).invites
        assert (invite.used, invite.uses) == (1, 1)
        who = await two.ask(WhoAmI(), NodeIdentity)
        assert (who.peer_id, who.grant, who.mesh_id) == (two.peer_id, "member", made.mesh_id)
        assert 29 < who.certificate_expires_in_seconds / DAY_SECONDS <= 30
        for node in (one, two):
            private = [path for path in node.paths.state.iterdir() if path.name in ("authority.json", "invites.json")]
            assert [path.stat().st_mode & 0o777 for path in private] == [0o600, 0o600]
            shown = await node.shown()
            for part in (token[20:60], token[-60:-20]):
                assert part not in shown, "the token never shows"
                assert all(part not in path.read_text() for path in node.paths.state.glob("*.json"))
        assert token[20:60] not in logged.getvalue()
        assert "event=admitted" in logged.getvalue()

    play(mesh_home, scene)


def test_a_restart_keeps_everything(mesh_home: Path) -> None:
    async def scene(net: Net) -> None:
        one = await net.add("one")
        two = await joined(net, one, "two")
        stranger = await net.add("stranger")
        await one.ask(BanPeer(peer=stranger.peer_id), Done)
        await until(lambda: two.trust.banned == (stranger.peer_id,), WAIT_SECONDS, "the ban arrives")
        for node in (one, two):
            before = node.trust
            await node.restart_gossipd()
            assert node.trust == before
        net.connect(one, two)
        assert (await one.ask(ListInvites(), InviteList)).invites[0].used == 1

    play(mesh_home, scene)


def test_refused_tokens_say_what_to_do(mesh_home: Path) -> None:
    async def scene(net: Net) -> None:
        one, two, other = await net.add("one"), await net.add("two"), await net.add("other")
        token = await token_of(one)
        middle = len(token) // 2
        swapped = token[:middle] + ("A" if token[middle] != "A" else "B") + token[middle + 1 :]
        cases = [("no token", "token_foreign"), (token[:-9], "token_damaged"), (swapped, "token_damaged")]
        for wrong, code in cases:
            assert (await two.refused(JoinMesh(token=wrong))).code == code
            assert two.joins == [] or two.joins[-1].steps[-1].state == "failed"
        (invite,) = (await one.ask(ListInvites(), InviteList)).invites
        await one.ask(RevokeInvite(invite_id=invite.invite_id), Done)
        error = await two.refused(JoinMesh(token=token))
        assert (error.code, "new one" in error.detail) == ("invite_revoked", True)
        expired = (await one.ask(CreateInvite(expires_seconds=60.0), InviteCreated)).token
        net.late_seconds = 120.0
        assert (await two.refused(JoinMesh(token=expired))).code == "invite_expired"
        once = await token_of(one)
        await two.ask(JoinMesh(token=once), MeshJoined)
        assert (await other.refused(JoinMesh(token=once))).code == "invite_used_up"
        assert (await one.refused(JoinMesh(token=once))).code == "own_mesh"
        foreign = await token_of(other)
        assert (await two.refused(JoinMesh(token=foreign))).code == "in_another_mesh"
        await one.stop_gossipd()
        third = await net.add("third")
        error = await third.refused(JoinMesh(token=once))
        assert error.code == "peer_unreachable"
        assert [(step.name, step.state) for step in third.joins[-1].steps][-1] == ("connect", "failed")
        one.start_gossipd()

    play(mesh_home, scene)


def test_switch_and_leave(mesh_home: Path) -> None:
    async def scene(net: Net) -> None:
        one, other = await net.add("one"), await net.add("other")
        two = await joined(net, one, "two")
        joined_mesh = await two.ask(JoinMesh(token=await token_of(other), switch=True), MeshJoined)
        await in_mesh(two, joined_mesh.mesh_id)
        assert mesh_of(two) == mesh_of(other) != mesh_of(one)
        left = await two.ask(LeaveMesh(), Done)
        assert two.goodbyes[-2:] == [mesh_of(one), mesh_of(other)], "the others hear of it while it can still say so"
        assert "mesh of its own" in left.detail
        await until(lambda: mesh_of(two) not in (mesh_of(one), mesh_of(other)), WAIT_SECONDS, "two is alone")
        alone = mesh_of(two)
        await until(lambda: two.trust.mesh_id == alone, WAIT_SECONDS, "tunneld hears of it")
        assert (two.trust.chain_der, two.trust.root_der) == ((), b"")
        text = AuthorityFiles(two.paths.state).credentials_path.read_text()
        assert "PRIVATE" not in text
        await two.restart_gossipd()
        assert mesh_of(two) == alone

    play(mesh_home, scene)


def test_a_named_mesh(mesh_home: Path) -> None:
    async def scene(net: Net) -> None:
        one = await net.add("one")
        made = await one.ask(InitMesh(name="home"), MeshJoined)
        assert (made.mesh_name, len(made.mesh_id), made.already) == ("home", 64, False)
        assert (await one.ask(InitMesh(name="home"), MeshJoined)).already
        assert (await one.ask(InitMesh(), MeshJoined)).mesh_id == made.mesh_id
        two = await joined(net, one, "two")
        await in_mesh(two, made.mesh_id)
        assert (await two.ask(InitMesh(name="home"), MeshJoined)).already
        assert (await two.refused(InitMesh(name="mine"))).code == "in_another_mesh"
        again = await two.ask(InitMesh(name="home", switch=True), MeshJoined)
        assert again.already, "it is in that mesh"
        mine = await two.ask(InitMesh(name="mine", switch=True), MeshJoined)
        await in_mesh(two, mine.mesh_id)
        assert (await one.refused(InitMesh(name="a\nb"))).code == "bad_name"

    play(mesh_home, scene)


def test_a_ban_reaches_everybody_and_can_be_lifted(mesh_home: Path) -> None:
    async def scene(net: Net) -> None:
        one = await net.add("one")
        two, three = await joined(net, one, "two"), await joined(net, one, "three")
        net.connect(two, three)
        assert (await two.refused(BanPeer(peer=three.peer_id))).code == "not_an_issuer"
        await one.ask(BanPeer(peer=three.peer_id[-6:]), Done)
        await until(lambda: two.trust.banned == (three.peer_id,), WAIT_SECONDS, "two hears of the ban")
        await until(lambda: three.peer_id not in two.links and three.peer_id not in one.links, WAIT_SECONDS, "cut")
        assert "banned" in await refuses(net, two, three)
        assert "banned" in one.daemon.explain(three.peer_id)[0]
        assert (await three.refused(JoinMesh(token=await token_of(one)))).code == "banned"
        await one.ask(BanPeer(peer=three.peer_id, lift=True), Done)
        await until(lambda: two.trust.banned == (), WAIT_SECONDS, "two hears of the lift")
        net.connect(two, three)

    play(mesh_home, scene)


def test_a_node_that_was_away_hears_of_a_ban_when_it_connects(mesh_home: Path) -> None:
    async def scene(net: Net) -> None:
        one = await net.add("one")
        two, three = await joined(net, one, "two"), await joined(net, one, "three")
        net.cut(one, three)
        await one.ask(BanPeer(peer=two.peer_id), Done)
        net.connect(one, three)
        await until(lambda: three.trust.banned == (two.peer_id,), WAIT_SECONDS, "three hears of it")

    play(mesh_home, scene)


def test_after_a_restart_of_tunneld_claims_are_told_anew(mesh_home: Path) -> None:
    async def scene(net: Net) -> None:
        one = await net.add("one")
        two = await joined(net, one, "two")
        await one.restart_tunneld()
        two.links.clear()
        await until(lambda: not one.daemon.desk.exchange.connected(), WAIT_SECONDS, "gossipd knows of it")
        stranger = await net.add("stranger")
        await one.ask(BanPeer(peer=stranger.peer_id), Done)
        assert two.trust.banned == ()
        for _ in range(4):
            # Telling is best effort: a message lost with the old tunneld is told again when the link comes up anew.
            net.connect(one, two)
            with contextlib.suppress(AssertionError):
                await until(lambda: two.trust.banned == (stranger.peer_id,), WAIT_SECONDS / 4, "two hears of it")
                return
            net.cut(one, two)
        raise AssertionError("two never hears of it")

    play(mesh_home, scene)


def test_a_ban_is_passed_on(mesh_home: Path) -> None:
    """One and three have no connection: two, between them, hands the ban on."""

    async def scene(net: Net) -> None:
        one = await net.add("one")
        two, three = await joined(net, one, "two"), await joined(net, one, "three")
        net.cut(one, three)
        net.connect(two, three)
        stranger = await net.add("stranger")
        await one.ask(BanPeer(peer=stranger.peer_id), Done)
        await until(lambda: three.trust.banned == (stranger.peer_id,), WAIT_SECONDS, "three hears of it")

    play(mesh_home, scene)


def test_a_used_invite_stays_used_whoever_is_killed_or_asked(mesh_home: Path) -> None:
    async def scene(net: Net) -> None:
        one = await net.add("one")
        issuer = await joined(net, one, "issuer", "issuer")
        token = await token_of(one)
        await (await net.add("two")).ask(JoinMesh(token=token), MeshJoined)
        claims = issuer.daemon.desk.trust.claims
        assert claims is not None
        await until(lambda: len(claims.redeemed) == 2, WAIT_SECONDS, "the other issuer hears of it")
        await one.restart_gossipd()
        three = await net.add("three")
        assert (await three.refused(JoinMesh(token=token))).code == "invite_used_up"

    play(mesh_home, scene)


def test_another_issuer_admits_and_a_ban_of_it_ends_that(mesh_home: Path) -> None:
    async def scene(net: Net) -> None:
        one = await net.add("one")
        two = await joined(net, one, "two", "issuer")
        await until(lambda: two.trust.issuer, WAIT_SECONDS, "two may admit")
        assert (await two.refused(CreateInvite(grant="issuer"))).code == "not_the_creator"
        assert (await two.refused(BanPeer(peer=one.peer_id))).code == "creator_decided"
        three = await joined(net, two, "three")
        net.connect(one, three)
        await one.ask(BanPeer(peer=two.peer_id), Done)
        await until(lambda: two.peer_id in three.trust.banned, WAIT_SECONDS, "three hears of it")
        assert "join again" in await refuses(net, one, three)
        await three.ask(JoinMesh(token=await token_of(one)), MeshJoined)
        await until(lambda: connects(net, one, three), WAIT_SECONDS, "three is in again")

    play(mesh_home, scene)


def connects(net: Net, one: TrustNode, two: TrustNode) -> bool:
    try:
        net.connect(one, two)
    except CertificateRefused:
        return False
    return True


def test_a_trusted_guest(mesh_home: Path) -> None:
    async def scene(net: Net) -> None:
        one = await net.add("one")
        guest = await joined(net, one, "guest", "guest")
        assert one.links[guest.peer_id].grant == "guest"
        await one.ask(TrustPeer(peer=guest.peer_id), Done)
        await until(lambda: guest.trust.trusted == (guest.peer_id,), WAIT_SECONDS, "it hears that it is trusted")

    play(mesh_home, scene)


def test_certificates_are_renewed_before_they_expire(mesh_home: Path) -> None:
    async def scene(net: Net) -> None:
        one = await net.add("one")
        two = await joined(net, one, "two")
        old = {node.name: node.trust.chain_der for node in (one, two)}
        net.late_seconds = 21 * DAY_SECONDS
        for node in (one, two):
            node.daemon.desk.exchange.wake()
        await until(lambda: one.trust.chain_der != old["one"], WAIT_SECONDS, "one renewed itself")
        await until(lambda: two.trust.chain_der != old["two"], WAIT_SECONDS, "two was renewed")
        net.cut(one, two)
        net.late_seconds = 45 * DAY_SECONDS
        net.connect(one, two)
        assert two.grant_of(one) == "issuer"
        assert one.grant_of(two) == "member"

    play(mesh_home, scene)


def test_a_renewal_never_changes_the_grant(mesh_home: Path) -> None:
    async def scene(net: Net) -> None:
        one = await net.add("one")
        two = await joined(net, one, "two")
        net.cut(one, two)
        net.late_seconds = 21 * DAY_SECONDS
        asked = RenewCertificate(csr_der=make_csr(two.key))
        authority = one.daemon.desk.trust.authority
        assert authority is not None
        wrong, right = (
            authority.renew(two.peer_id, grant, asked, now_unix_seconds=net.clock()) for grant in GRANTS_ASKED
        )
        for answer in (wrong, right, right):
            two.tunneld.publish(FromPeer(peer_id=one.peer_id, payload=codec.encode(answer), channel="enroll"))
        await until(lambda: two.trust.chain_der == right.chain_der, WAIT_SECONDS, "renewed as a member")
        assert two.daemon.bus.counters["renewals_refused"] == 1

    play(mesh_home, scene)


def test_what_a_peer_may_say_wrongly_is_counted_and_changes_nothing(
    mesh_home: Path, logged: io.StringIO
) -> None:
    async def scene(net: Net) -> None:
        one = await net.add("one")
        two = await joined(net, one, "two")
        before = one.trust
        for payload in (
            b"",
            b"\xc1garbage",
            codec.encode(TrustStatement(mesh_id=MeshId("another"))),
            codec.encode(Done()),
            codec.encode(RenewCertificate(csr_der=b"no request")),
        ):
            for _ in range(3):
                one.tunneld.publish(FromPeer(peer_id=two.peer_id, payload=payload, channel="enroll"))
        counters = one.daemon.bus.counters
        await until(lambda: counters.get("enroll_frames_refused", 0) == 6, WAIT_SECONDS, "counted")
        await until(lambda: counters.get("claims_refused", 0) == 3, WAIT_SECONDS, "counted")
        assert one.trust == before
        assert 0 < logged.getvalue().count("of mesh another") <= 2

    play(mesh_home, scene)


def test_draining_is_kept(mesh_home: Path) -> None:
    async def scene(net: Net) -> None:
        one = await net.add("one")

        def state() -> str:
            own = one.daemon.membership.own
            return own.state if own else ""

        assert "drain --off" in (await one.ask(DrainNode(), Done)).detail
        await until(lambda: state() == "draining", WAIT_SECONDS, "announced")
        await one.restart_gossipd()
        await until(lambda: state() == "draining", WAIT_SECONDS, "still so")
        await one.ask(DrainNode(off=True), Done)
        await until(lambda: state() == "active", WAIT_SECONDS, "back")

    play(mesh_home, scene)


def test_what_cannot_be_kept_does_not_count(mesh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> None:
        raise StateError("cannot write authority.json: No space left on device; free some space there")

    async def scene(net: Net) -> None:
        one, two, three = await net.add("one"), await net.add("two"), await net.add("three")
        token = await token_of(one, uses=9)
        before, trusted = mesh_of(two), two.trust
        with monkeypatch.context() as patched:
            patched.setattr(AuthorityFiles, "save_credentials", full)
            for request in (JoinMesh(token=token), InitMesh(name="home"), CreateInvite()):
                error = await two.refused(request)
                assert (error.code, "free some space" in error.detail) == ("state", True)
        assert (mesh_of(two), two.trust) == (before, trusted)
        with monkeypatch.context() as patched:
            patched.setattr(AuthorityFiles, "save_decisions", full)
            assert (await one.refused(BanPeer(peer=two.peer_id))).code == "state"
            assert one.trust.banned == ()
            assert (await three.refused(JoinMesh(token=token))).code == "state", "who was admitted must be known"
            assert (await one.ask(ListInvites(), InviteList)).invites[0].used == 1, "two, whose own disk was full"
        await two.ask(JoinMesh(token=token), MeshJoined)

    play(mesh_home, scene)


def test_only_one_join_at_a_time_and_another_while_it_waits_is_told(mesh_home: Path) -> None:
    async def scene(net: Net) -> None:
        one, two = await net.add("one"), await net.add("two")
        token = await token_of(one)
        asked = await asyncio.gather(
            *(two.client.request(JoinMesh(token=token), deadline_seconds=WAIT_SECONDS) for _ in range(3)),
            return_exceptions=True,
        )
        assert sum(isinstance(reply, MeshJoined) for reply in asked) == 1
        assert {reply.code for reply in asked if isinstance(reply, RequestRefused)} == {"busy"}

    play(mesh_home, scene)
