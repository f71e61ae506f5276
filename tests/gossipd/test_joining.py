"""The join machine against docs/spec/joining.md."""

from __future__ import annotations

import pytest

from services.gossipd.joining import (
    Adopt,
    Enroll,
    EnrollAnswered,
    JoinAsked,
    Joining,
    JoinReply,
    MeshKnown,
    PublishJoin,
    Stimulus,
    Ticket,
)
from shared.ids import MeshId, ModelName, PeerId
from shared.messages.daemon import Refused
from shared.messages.models import Assignment, AssignmentsChanged
from shared.messages.trust import Enrolled, MeshJoined, PeerAddresses
from shared.messages.tunnel import LinkChanged

MESH = MeshId("mesh-a")
PEER = PeerId("12D3KooWM6CgA9iBFZmcYAHA6A2qvbAxqfkmrYiRQuz3XEsk4Ksv")
TICKET = Ticket(
    mesh_id=MESH,
    mesh_name="home",
    root_fingerprint="ab" * 32,
    addresses=("/ip4/127.0.0.1/udp/9340/quic-v1",),
    invite=b"the secret invite",
)
ENROLLED = Enrolled(
    root_der=b"root",
    chain_der=(b"leaf", b"issuer"),
    mesh_id=MESH,
    mesh_name="home",
    grant="member",
    peers=(PeerAddresses(peer_id=PEER),),
)


class Joiner:
    """A machine with its effects collected and its invariants checked after each step."""

    def __init__(self) -> None:
        self.machine = Joining()
        self.effects: list[object] = []

    def give(self, *stimuli: Stimulus) -> Joiner:
        for stimulus in stimuli:
            self.effects += self.machine.handle(stimulus)
            self.machine.check_invariants()
        return self

    def steps(self) -> list[tuple[str, str]]:
        return [(step.name, step.state) for step in self.machine.join.steps]

    def replies(self) -> list[object]:
        return [effect.message for effect in self.effects if isinstance(effect, JoinReply)]


def asked(switch: bool = False) -> JoinAsked:
    return JoinAsked(reply_to=1, ticket=TICKET, switch=switch)


def test_every_step_is_published_in_order() -> None:
    """1. A join has the steps token, connect, verify, admitted, peers, assigned, in this order."""
    joiner = Joiner().give(
        asked(),
        EnrollAnswered(ENROLLED),
        LinkChanged(peer_id=PEER, state="waiting", reason="no answer yet, next try in 1 s"),
        LinkChanged(peer_id=PEER, state="connected", reason="over QUIC"),
        AssignmentsChanged(
            assignments=(Assignment(model=ModelName("tiny"), origin="allocation", reason="nobody serves it"),)
        ),
    )
    assert joiner.steps() == [
        (name, "done") for name in ("token", "connect", "verify", "admitted", "peers", "assigned")
    ]
    shown = [effect.join.steps[-1] for effect in joiner.effects if isinstance(effect, PublishJoin)]
    assert [(step.name, step.state) for step in shown] == [
        ("connect", "waiting"),
        ("peers", "waiting"),
        ("peers", "waiting"),
        ("assigned", "waiting"),
        ("assigned", "done"),
    ]
    assert "no answer yet" in shown[2].detail


def test_another_mesh_is_not_left_by_accident() -> None:
    """2. A node that is in another mesh with somebody else refuses, unless it is told to switch."""
    other = MeshKnown(MeshId("mesh-b"), "work", alone=False)
    joiner = Joiner().give(other, asked())
    assert joiner.steps() == [("token", "failed")]
    (refused,) = joiner.replies()
    assert isinstance(refused, Refused)
    assert refused.code == "in_another_mesh"
    assert "--switch" in refused.detail
    assert not any(isinstance(effect, Enroll) for effect in joiner.effects)
    assert any(isinstance(effect, Enroll) for effect in Joiner().give(other, asked(switch=True)).effects)


def test_a_mesh_of_one_is_left_silently() -> None:
    """3. A mesh of one is no reason to refuse: nobody is left behind."""
    joiner = Joiner().give(MeshKnown(MeshId("mesh-b"), "", alone=True), asked())
    assert joiner.steps()[-1] == ("connect", "waiting")


def test_the_same_mesh_again_renews() -> None:
    """4. A token of the mesh the node is in already renews its certificate and changes nothing else."""
    joiner = Joiner().give(MeshKnown(MESH, "home", alone=False), asked(), EnrollAnswered(ENROLLED))
    (reply,) = joiner.replies()
    assert isinstance(reply, MeshJoined)
    assert reply.already


def test_one_join_at_a_time() -> None:
    """5. Only one join runs at a time; a second one is refused until the first was answered."""
    joiner = Joiner().give(asked(), JoinAsked(reply_to=2, ticket=TICKET))
    (refused,) = joiner.replies()
    assert isinstance(refused, Refused)
    assert refused.code == "busy"
    joiner.give(EnrollAnswered(Refused(code="peer_unreachable", detail="nobody answered")), asked())
    assert joiner.steps()[-1] == ("connect", "waiting")


def test_answered_as_soon_as_admitted() -> None:
    """6. The person is answered as soon as the node is admitted; peers and assignment follow in the background."""
    joiner = Joiner().give(asked(), EnrollAnswered(ENROLLED))
    (reply,) = joiner.replies()
    assert isinstance(reply, MeshJoined)
    assert not reply.already
    assert [effect.enrolled for effect in joiner.effects if isinstance(effect, Adopt)] == [ENROLLED]
    assert joiner.steps()[-1] == ("peers", "waiting")


@pytest.mark.parametrize(
    ("code", "step"),
    [
        ("peer_unreachable", "connect"),
        ("daemon_unreachable", "connect"),
        ("not_for_me", "connect"),
        ("wrong_mesh", "verify"),
        ("certificate_refused", "verify"),
        ("invite_expired", "admitted"),
    ],
)
def test_the_failed_step_says_where_it_failed(code: str, step: str) -> None:
    """7. Nobody answers: connect; somebody of another mesh: verify; the issuer says no: admitted."""
    joiner = Joiner().give(asked(), EnrollAnswered(Refused(code=code, detail="the reason")))
    assert joiner.steps()[-1] == (step, "failed")
    assert joiner.machine.join.steps[-1].detail == "the reason"
    assert [reply.code for reply in joiner.replies() if isinstance(reply, Refused)] == [code]
    assert not joiner.machine.busy


def test_an_answer_for_another_mesh_is_refused() -> None:
    """7. ... somebody answers who is not of the token's mesh."""
    wrong = Enrolled(root_der=b"", chain_der=(), mesh_id=MeshId("mesh-x"), mesh_name="", grant="member")
    joiner = Joiner().give(asked(), EnrollAnswered(wrong))
    assert joiner.steps()[-1] == ("verify", "failed")
    assert not any(isinstance(effect, Adopt) for effect in joiner.effects)


def test_a_token_that_cannot_be_read() -> None:
    """1. ... or why it failed."""
    joiner = Joiner().give(
        JoinAsked(reply_to=1, ticket=None, refused=Refused(code="token_typo", detail="a character is wrong"))
    )
    assert joiner.steps() == [("token", "failed")]
    assert [reply.code for reply in joiner.replies() if isinstance(reply, Refused)] == ["token_typo"]


def test_no_step_shows_the_invite() -> None:
    """8. The token never appears in a step."""
    joiner = Joiner().give(asked(), EnrollAnswered(ENROLLED))
    shown = repr([effect for effect in joiner.effects if isinstance(effect, PublishJoin)])
    assert "secret invite" not in shown


def test_nobody_else_there() -> None:
    """6. ... a mesh whose other nodes are all down is joined too."""
    alone = Enrolled(root_der=b"", chain_der=(), mesh_id=MESH, mesh_name="home", grant="member")
    joiner = Joiner().give(asked(), EnrollAnswered(alone), AssignmentsChanged(assignments=(), idle_reason="no file"))
    assert joiner.steps()[-1] == ("assigned", "done")
    assert "no file" in joiner.machine.join.steps[-1].detail
