"""Who still answers: SWIM failure detection for one node. Pure; ``now`` is monotonic seconds, chance comes from a seed.

Theory of operation. Each second the next node of a shuffled round is probed. One that does not answer in time is probed
through three others; if that fails too it is suspected, and everybody connected hears of it. A suspected node refutes
with a higher incarnation. One that does not in time is dead, which everybody hears as well; only its own newer record
undoes it. All probes run side by side, so a slow node delays nobody else's.

======  =====================================  ===========================================================
state   event                                  new state, and what is told
======  =====================================  ===========================================================
alive   no answer, directly nor through others suspect; PeerDown(suspect) to all connected
alive   PeerDown, answered just now            probed at once, and told so that it refutes
alive   PeerDown(suspect) of this incarnation  suspect; passed on
alive   PeerDown(dead), otherwise              dead; passed on
suspect own answer                             alive
suspect timeout                                dead; PeerDown(dead) to all connected
any     own record of a higher incarnation     alive
any     own goodbye                            left
dead    anything else                          dead
======  =====================================  ===========================================================
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from services.gossipd.chance import number, shuffled, some
from services.gossipd.suspicion import (
    FRESH_SECONDS,
    HELPERS,
    LINK_GRACE_SECONDS,
    PROBE_SECONDS,
    probe_timeout,
    suspicion_seconds,
)
from shared.ids import PeerId
from shared.messages.gossip import PeerDown, Probe, ProbeAck, ProbeRequest
from shared.messages.mesh import MemberState
from shared.messages.tunnel import PeerChannel

RELAYED_LIMIT = 1_000
"""Probes for others on their way at once; more are refused."""
REPEAT_SECONDS = 5.0
"""The same claim is passed on again after it."""
CLAIM_JUMP_LIMIT = 1_000_000
"""Nobody makes a node skip more incarnations than that at once."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Send ``message`` to each of ``peers``."""

    peers: tuple[PeerId, ...]
    message: object
    channel: PeerChannel = "gossip"


@dataclass(slots=True)
class Peer:
    """One other node, as far as failure detection goes."""

    peer_id: PeerId
    incarnation: int
    known_at: float
    state: MemberState = "alive"
    reason: str = "heard of it"
    linked: bool = False
    was_linked: bool = False
    rtt_seconds: float | None = None
    heard_at: float | None = None
    state_at: float = 0.0
    dead_at: float | None = None
    """When a suspected one counts as dead."""
    nonce: int = 0
    """Of the probe that runs; 0 for none."""
    probed_at: float = 0.0
    probe_until: float = 0.0
    through_others: bool = False
    unanswered: int = 0


@dataclass(slots=True)
class Relayed:
    """A probe on behalf of another node."""

    asked_by: PeerId
    nonce: int
    subject: PeerId
    until: float


@dataclass(slots=True)
class Swim:
    """The failure detector of the node ``own``."""

    own: PeerId
    seed: int
    peers: dict[PeerId, Peer] = field(default_factory=dict)
    changed: set[PeerId] = field(default_factory=set)
    """Whose state or reason is other than when the set was last emptied."""
    names: dict[PeerId, str] = field(default_factory=dict)
    wanted: Collection[PeerId] = frozenset()
    """Whom this node keeps connected: whom it watches, besides those connected anyway."""
    links_of: dict[PeerId, frozenset[PeerId]] = field(default_factory=dict)
    """Who is connected to whom, as they say in their load records."""
    _round: list[PeerId] = field(default_factory=list)
    _rounds: int = 0
    _nonce: int = 0
    _probe_at: float | None = None
    _relayed: dict[int, Relayed] = field(default_factory=dict)
    _claims: dict[tuple[PeerId, int, str], float] = field(default_factory=dict)
    """When each claim was passed on."""

    # -- what is known ------------------------------------------------------------------------------------------

    def present(self) -> list[PeerId]:
        """Those that take part: alive or only suspected."""
        return [peer.peer_id for peer in self.peers.values() if peer.state in ("alive", "suspect")]

    def connected(self) -> tuple[PeerId, ...]:
        return tuple(sorted(peer.peer_id for peer in self.peers.values() if peer.linked))

    def next_deadline(self) -> float | None:
        deadlines = [self._probe_at] if self._probe_at is not None and self.present() else []
        for peer in self.peers.values():
            if peer.nonce:
                deadlines.append(peer.probe_until)
            if peer.dead_at is not None:
                deadlines.append(peer.dead_at)
        return min(deadlines, default=None)

    def shift(self, seconds: float, now: float) -> None:
        """This node slept for ``seconds``: nobody's silence meanwhile counts."""
        for peer in self.peers.values():
            peer.nonce = 0
            peer.known_at = max(peer.known_at, now - LINK_GRACE_SECONDS / 2)
            if peer.dead_at is not None:
                peer.dead_at += seconds
        self._relayed.clear()

    # -- evidence of life ---------------------------------------------------------------------------------------

    def own_record(self, peer_id: PeerId, incarnation: int, *, leaving: bool, now: float) -> None:
        """A newer record, signed by the node itself."""
        peer = self.peers.get(peer_id)
        if peer is None:
            peer = self.peers[peer_id] = Peer(peer_id, incarnation, now)
            self._set(peer, "alive", "a new node", now)
            if self._probe_at is None:
                self._probe_at = now + PROBE_SECONDS * (number(self.seed, self.own, "phase") % 1000) / 1000
        newer = incarnation > peer.incarnation
        peer.incarnation = max(incarnation, peer.incarnation)
        if leaving:
            peer.nonce, peer.dead_at = 0, None
            self._set(peer, "left", "said goodbye", now)
        elif newer and peer.state != "alive":
            peer.known_at = now
            peer.dead_at, peer.nonce, peer.unanswered = None, 0, 0
            back = "refuted that it was down" if peer.state == "suspect" else "is back"
            self._set(peer, "alive", back, now)

    def heard(self, peer_id: PeerId, now: float) -> None:
        """The node itself answered or spoke, over a verified link or through a helper."""
        peer = self.peers.get(peer_id)
        if peer is None:
            return
        peer.heard_at, peer.nonce, peer.unanswered = now, 0, 0
        if peer.state == "suspect":
            peer.dead_at = None
            self._set(peer, "alive", "answers again", now)
        elif peer.state == "alive" and peer.reason != "answers":
            # Only a word: it need not be published at once.
            peer.reason = "answers"

    def link(self, peer_id: PeerId, *, connected: bool, rtt_seconds: float | None, now: float) -> list[Tell]:
        """A link came or went. A lost one is evidence: it is asked for through others at once."""
        peer = self.peers.get(peer_id)
        if peer is None:
            return []
        lost = peer.linked and not connected
        came = connected and not peer.linked
        peer.linked = connected
        if connected:
            peer.was_linked = True
            peer.rtt_seconds = rtt_seconds if rtt_seconds is not None else peer.rtt_seconds
            if came:
                self.heard(peer_id, now)
        if lost and peer.state == "alive":
            return self._probe(peer, now)
        return []

    # -- messages -----------------------------------------------------------------------------------------------

    def on_probe(self, sender: PeerId, probe: Probe) -> list[Tell]:
        return [Tell((sender,), ProbeAck(nonce=probe.nonce, subject=self.own))]

    def on_request(self, sender: PeerId, asked: ProbeRequest, now: float) -> list[Tell]:
        """Probe for somebody else, if there is a link to the subject; silence otherwise."""
        subject = self.peers.get(asked.subject)
        self._relayed = {nonce: item for nonce, item in self._relayed.items() if item.until > now}
        if subject is None or not subject.linked or len(self._relayed) >= RELAYED_LIMIT:
            return []
        nonce = self._next_nonce()
        until = now + 2 * probe_timeout(subject.rtt_seconds)
        self._relayed[nonce] = Relayed(sender, asked.nonce, asked.subject, until)
        return [Tell((asked.subject,), Probe(nonce=nonce))]

    def on_ack(self, sender: PeerId, ack: ProbeAck, now: float) -> list[Tell]:
        relayed = self._relayed.get(ack.nonce)
        if relayed is not None and relayed.subject == sender == ack.subject:
            del self._relayed[ack.nonce]
            self.heard(sender, now)
            return [Tell((relayed.asked_by,), ProbeAck(nonce=relayed.nonce, subject=sender))]
        peer = self.peers.get(ack.subject)
        if peer is None:
            return []
        if sender == ack.subject:
            if peer.nonce == ack.nonce and not peer.linked:
                peer.rtt_seconds = now - peer.probed_at
            self.heard(sender, now)
        elif peer.nonce == ack.nonce:
            # A helper's word counts only for the question that it was asked.
            self.heard(ack.subject, now)
        return []

    def on_claim(self, sender: PeerId, claim: PeerDown, now: float) -> list[Tell]:
        """Somebody says that a node is down. Claims about this node are not for here."""
        peer = self.peers.get(claim.subject)
        if peer is None or claim.incarnation < peer.incarnation or peer.state in ("dead", "left"):
            return []
        who = self.names.get(claim.accuser) or claim.accuser[-8:]
        if peer.state == "alive" and peer.linked and peer.heard_at is not None and now - peer.heard_at < FRESH_SECONDS:
            if not self._first(claim, now):
                return []
            probes = self._probe(peer, now) if not peer.nonce else []
            return [*probes, Tell((peer.peer_id,), claim, "peer_down")]
        if claim.state == "dead":
            return self._die(peer, f"{who} says it is down", now, claim.accuser, sender)
        if peer.state == "suspect":
            return []
        passed_on = self._suspect(peer, f"no answer to {who}", now, claim.accuser, sender)
        told = passed_on if self._first(claim, now) else []
        return told + ([] if peer.nonce else self._probe(peer, now))

    def _first(self, claim: PeerDown, now: float) -> bool:
        """Whether the claim was not heard for a while, whoever made it: repeated ones travel no further."""
        key = (claim.subject, claim.incarnation, claim.state)
        before = self._claims.get(key)
        if before is not None and now - before < REPEAT_SECONDS:
            return False
        if len(self._claims) >= RELAYED_LIMIT:
            self._claims = {key: at for key, at in self._claims.items() if now - at < REPEAT_SECONDS}
        self._claims[key] = now
        return True

    # -- time ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Tell]:
        told: list[Tell] = []
        for peer in list(self.peers.values()):
            if peer.dead_at is not None and now >= peer.dead_at:
                told += self._die(peer, f"{peer.reason}, and it did not refute", now, self.own, None)
            elif peer.nonce and now >= peer.probe_until:
                told += self._unanswered(peer, now)
        if self._probe_at is not None and now >= self._probe_at:
            # A late tick makes up for nothing: the next probe is a whole period away.
            self._probe_at = max(self._probe_at + PROBE_SECONDS, now + PROBE_SECONDS / 2)
            told += self._probe_next(now)
        return told

    def _probe_next(self, now: float) -> list[Tell]:
        for _ in range(2):
            while self._round:
                peer = self.peers.get(self._round.pop())
                if peer is None or peer.state not in ("alive", "suspect") or peer.nonce:
                    continue
                return self._probe(peer, now)
            self._rounds += 1
            self._round = shuffled(self.probed(), self.seed, self.own, "round", self._rounds)
        return []

    def probed(self) -> list[PeerId]:
        """Whom this node watches."""
        return [
            peer.peer_id
            for peer in self.peers.values()
            if peer.state in ("alive", "suspect") and (peer.linked or peer.peer_id in self.wanted)
        ]

    def _probe(self, peer: Peer, now: float) -> list[Tell]:
        if not peer.linked and not peer.was_linked and now - peer.known_at < LINK_GRACE_SECONDS:
            return []
        peer.nonce = self._next_nonce()
        peer.probed_at = now
        peer.through_others = not peer.linked
        peer.probe_until = now + probe_timeout(peer.rtt_seconds)
        if peer.linked:
            return [Tell((peer.peer_id,), Probe(nonce=peer.nonce))]
        return self._ask_helpers(peer)

    def _ask_helpers(self, peer: Peer) -> list[Tell]:
        able = [
            other.peer_id
            for other in self.peers.values()
            if other.linked and other.state == "alive" and other.peer_id != peer.peer_id
        ]
        knowing = [other for other in able if peer.peer_id in self.links_of.get(other, ())]
        helpers = some(knowing or able, HELPERS, self.seed, self.own, peer.nonce)
        if not helpers:
            return []
        return [Tell(tuple(helpers), ProbeRequest(nonce=peer.nonce, subject=peer.peer_id))]

    def _unanswered(self, peer: Peer, now: float) -> list[Tell]:
        peer.unanswered += 1
        if not peer.through_others:
            peer.through_others = True
            peer.probe_until = now + probe_timeout(peer.rtt_seconds)
            asked = self._ask_helpers(peer)
            if asked:
                return asked
        peer.nonce = 0
        if peer.state != "alive":
            return []
        how = "its link is lost and no other node reaches it" if not peer.linked else "no answer to probes"
        return self._suspect(peer, how, now, self.own, None)

    # -- changes ------------------------------------------------------------------------------------------------

    def _suspect(self, peer: Peer, reason: str, now: float, accuser: PeerId, sender: PeerId | None) -> list[Tell]:
        peer.dead_at = now + suspicion_seconds(len(self.present()) + 1)
        self._set(peer, "suspect", reason, now)
        return self._claim(peer, "suspect", accuser, sender)

    def _die(self, peer: Peer, reason: str, now: float, accuser: PeerId, sender: PeerId | None) -> list[Tell]:
        peer.nonce, peer.dead_at = 0, None
        self._set(peer, "dead", reason, now)
        return self._claim(peer, "dead", accuser, sender)

    def _claim(self, peer: Peer, state: MemberState, accuser: PeerId, sender: PeerId | None) -> list[Tell]:
        assert state in ("suspect", "dead")
        claim = PeerDown(
            accuser=accuser,
            subject=peer.peer_id,
            incarnation=peer.incarnation,
            state="suspect" if state == "suspect" else "dead",
        )
        told = tuple(other for other in self.connected() if other != sender)
        if sender is not None and state == "suspect":
            # Passed on to a few and to the accused; whom that misses hears of the death, if it comes to one.
            few = set(some(told, HELPERS, self.seed, self.own, peer.peer_id, peer.incarnation))
            told = tuple(other for other in told if other in few or other == peer.peer_id)
        return [Tell(told, claim, "peer_down")] if told else []

    def _set(self, peer: Peer, state: MemberState, reason: str, now: float) -> None:
        peer.state, peer.reason, peer.state_at = state, reason, now
        self.changed.add(peer.peer_id)

    def forget(self, peer_id: PeerId) -> None:
        self.peers.pop(peer_id, None)
        self.changed.discard(peer_id)

    def _next_nonce(self) -> int:
        self._nonce += 1
        return number(self.seed, self.own, "nonce", self._nonce) >> 1 or 1
