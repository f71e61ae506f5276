"""Joining a mesh, step by step, so that a person sees at once where it stands and why it waits.

Theory of operation. One join at a time. Its steps only move forward; each says in words what it waits for or why it
failed, and what to do. The token itself is never part of a step, an error or the story.

==========  ==========================================  ====================================================
step        done when                                   fails when
==========  ==========================================  ====================================================
token       it was read                                 it is not a token, expired; this node is in a mesh
connect     a node of the mesh answered                 none of its addresses answered in time
verify      its certificates match the token's root     somebody else answers there
admitted    it signed this node's certificate           it refuses: expired, used up, revoked
peers       the first peer is connected                 (waits, with tunneld's reason)
assigned    electiond said what this node serves        (waits, with electiond's reason)
==========  ==========================================  ====================================================

Source: docs/spec/joining.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.ids import MeshId, PeerId
from shared.messages.daemon import Refused
from shared.messages.models import AssignmentsChanged
from shared.messages.trust import EnrollAt, Enrolled, JoinChanged, JoinStep, JoinStepName, JoinStepState, MeshJoined
from shared.messages.tunnel import LinkChanged

STEPS: tuple[JoinStepName, ...] = ("token", "connect", "verify", "admitted", "peers", "assigned")
DIAL_CODES = ("peer_unreachable", "daemon_unreachable", "timeout", "deadline", "not_for_me")
"""Refusals that mean: nobody answered, or this node's own tunneld could not ask."""
VERIFY_CODES = ("wrong_mesh", "certificate", "certificate_refused")
"""Refusals that mean: somebody answered who is not of that mesh."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a token says, without what could redeem it twice: addresses to try and the root to pin."""

    mesh_id: MeshId
    mesh_name: str
    root_fingerprint: str
    addresses: tuple[str, ...]
    invite: bytes


@dataclass(frozen=True, slots=True)
class JoinAsked:
    """A person wants to join. ``refused``: why the token cannot be used, found while it was read."""

    reply_to: int
    ticket: Ticket | None
    refused: Refused | None = None
    client: bool = False
    switch: bool = False


@dataclass(frozen=True, slots=True)
class EnrollAnswered:
    """tunneld's answer, or why there is none."""

    answer: Enrolled | Refused


@dataclass(frozen=True, slots=True)
class MeshKnown:
    """The mesh this node is in now; ``alone``: nobody else ever joined it, so that leaving it loses nothing."""

    mesh_id: MeshId
    mesh_name: str
    alone: bool


Stimulus = JoinAsked | EnrollAnswered | MeshKnown | LinkChanged | AssignmentsChanged


@dataclass(frozen=True, slots=True)
class Enroll:
    request: EnrollAt


@dataclass(frozen=True, slots=True)
class Adopt:
    """This node is admitted: keep root and certificate, trust and announce accordingly."""

    enrolled: Enrolled
    client: bool


@dataclass(frozen=True, slots=True)
class PublishJoin:
    join: JoinChanged


@dataclass(frozen=True, slots=True)
class JoinReply:
    reply_to: int
    message: MeshJoined | Refused


Effect = Enroll | Adopt | PublishJoin | JoinReply


class Joining:
    """The join machine. ``join`` is what was last published."""

    def __init__(self) -> None:
        self.join = JoinChanged()
        self._mesh = MeshKnown(MeshId(""), "", True)
        self._asked: JoinAsked | None = None
        self._admitted = False
        self._assignments = AssignmentsChanged(assignments=())

    def handle(self, stimulus: Stimulus) -> list[Effect]:
        before = self.join
        match stimulus:
            case JoinAsked():
                effects = self._ask(stimulus)
            case EnrollAnswered(answer=answer):
                effects = self._answered(answer)
            case MeshKnown():
                self._mesh = stimulus
                effects = []
            case LinkChanged():
                effects = []
                self._linked(stimulus)
            case AssignmentsChanged():
                effects = []
                self._assignments = stimulus
                self._assigned()
        return [PublishJoin(self.join), *effects] if self.join != before else effects

    @property
    def busy(self) -> bool:
        """Whether a join is on its way to being admitted."""
        return self._asked is not None

    def check_invariants(self) -> None:
        """Raises AssertionError when the machine contradicts itself."""
        steps = self.join.steps
        assert [step.name for step in steps] == list(STEPS[: len(steps)])
        assert all(step.state == "done" for step in steps[:-1])
        assert all(step.detail for step in steps)
        assert self._asked is None or (steps and steps[-1].state == "waiting")

    # -- steps ------------------------------------------------------------------------------------------------

    def _ask(self, asked: JoinAsked) -> list[Effect]:
        if self._asked is not None:
            busy = "another join is on its way; wait for it, it gives up within a minute if nobody answers"
            return [JoinReply(asked.reply_to, Refused(code="busy", detail=busy))]
        self._admitted = False
        self.join = JoinChanged()
        ticket = asked.ticket
        if ticket is None:
            refused = asked.refused or Refused(code="token", detail="this is not a meshd token")
            self._step("token", "failed", refused.detail)
            return [JoinReply(asked.reply_to, refused)]
        if ticket.mesh_id == self._mesh.mesh_id:
            self._step("token", "done", f"already in {_mesh_words(ticket)}; the certificate is renewed")
        elif self._mesh.mesh_id and not self._mesh.alone and not asked.switch:
            detail = (
                f"this node is in mesh {self._mesh.mesh_name or self._mesh.mesh_id} already; "
                "add --switch to leave it for the other one"
            )
            self._step("token", "failed", detail)
            return [JoinReply(asked.reply_to, Refused(code="in_another_mesh", detail=detail))]
        else:
            self._step("token", "done", f"an invitation to {_mesh_words(ticket)}")
        self._asked = asked
        self._step("connect", "waiting", f"trying {', '.join(ticket.addresses)}")
        return [
            Enroll(
                EnrollAt(
                    addresses=ticket.addresses,
                    root_fingerprint=ticket.root_fingerprint,
                    invite=ticket.invite,
                    client=asked.client,
                )
            )
        ]

    def _answered(self, answer: Enrolled | Refused) -> list[Effect]:
        asked, self._asked = self._asked, None
        if asked is None or asked.ticket is None:
            return []
        if isinstance(answer, Refused):
            self._failed_at(answer)
            return [JoinReply(asked.reply_to, answer)]
        if answer.mesh_id != asked.ticket.mesh_id:
            wrong = Refused(
                code="wrong_mesh",
                detail="the node that answered admits to another mesh than the token names; ask for a new token",
            )
            self._failed_at(wrong)
            return [JoinReply(asked.reply_to, wrong)]
        self._step("connect", "done", "a node of the mesh answered")
        self._step("verify", "done", "its certificate leads to the root that the token names")
        self._step("admitted", "done", f"as {answer.grant}")
        self._admitted = True
        count = len(answer.peers)
        if count:
            self._step("peers", "waiting", f"connecting to {count} {'peer' if count == 1 else 'peers'}")
        else:
            self._step("peers", "done", "no other node is there now")
            self._step("assigned", "waiting", "electiond decides what this node serves")
        joined = MeshJoined(
            mesh_id=answer.mesh_id,
            mesh_name=answer.mesh_name,
            grant=answer.grant,
            already=answer.mesh_id == self._mesh.mesh_id,
        )
        return [Adopt(answer, asked.client), JoinReply(asked.reply_to, joined)]

    def _failed_at(self, refused: Refused) -> None:
        if refused.code in DIAL_CODES:
            self._step("connect", "failed", refused.detail)
            return
        self._step("connect", "done", "somebody answered")
        if refused.code in VERIFY_CODES:
            self._step("verify", "failed", refused.detail)
            return
        self._step("verify", "done", "its certificate leads to the root that the token names")
        self._step("admitted", "failed", refused.detail)

    def _linked(self, link: LinkChanged) -> None:
        if not self._waits_at("peers"):
            return
        if link.state == "connected":
            self._step("peers", "done", f"connected to {_short(link.peer_id)} {link.reason}".rstrip())
            self._step("assigned", "waiting", "electiond decides what this node serves")
            self._assigned()
        elif link.state == "waiting":
            self._step("peers", "waiting", f"{_short(link.peer_id)}: {link.reason}")

    def _assigned(self) -> None:
        if not self._admitted or not self._waits_at("assigned"):
            return
        names = ", ".join(item.model for item in self._assignments.assignments)
        if names:
            self._step("assigned", "done", names)
        elif self._assignments.idle_reason:
            self._step("assigned", "done", f"no model: {self._assignments.idle_reason}")

    def _waits_at(self, name: JoinStepName) -> bool:
        steps = self.join.steps
        return bool(steps) and steps[-1].name == name and steps[-1].state == "waiting"

    def _step(self, name: JoinStepName, state: JoinStepState, detail: str) -> None:
        """Set the newest step or add the next one."""
        step = JoinStep(name=name, state=state, detail=detail)
        kept = self.join.steps
        if kept and kept[-1].name == name:
            kept = kept[:-1]
        self.join = replace(self.join, steps=(*kept, step))


def _mesh_words(ticket: Ticket) -> str:
    return f"mesh {ticket.mesh_name}" if ticket.mesh_name else f"the unnamed mesh {ticket.mesh_id}"


def _short(peer_id: PeerId) -> str:
    """The end tells peers apart; the beginning is the same for all."""
    return f"…{peer_id[-8:]}"
