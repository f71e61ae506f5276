"""gossipd's machine: this node's own word, what is known of all others, and what is to be told to whom.

Theory of operation. ``Membership`` speaks for this node, ``RecordStore`` keeps what others signed, ``Swim`` says who
still answers, ``Spreading`` and ``anti_entropy`` carry news and repair what got lost. In a mesh of one only the first
has anything to do.

==================  ======================================  =====================================================
stimulus            condition                               effects
==================  ======================================  =====================================================
RecordSigned        this node's newest announcement         Send Records to all connected; a goodbye: PeerLeaving
RecordSigned        this node's newest load record          Send Records to all connected
LinkChanged         came up                                 Send Digest and own records
LinkChanged         lost                                    Send ProbeRequest, as of ``swim.py``
FromPeer            Probe, ProbeRequest, ProbeAck           as of ``swim.py``
FromPeer            PeerDown about this node                refutes: PersistIdentity, SignAnnouncement
FromPeer            Records, PeerLeaving: news              PublishMember, and passed on
FromPeer            Digest, RecordsWanted                   Send Records, RecordsWanted, PeerDown
FromPeer            anything else                           Refuse
TrustKnown          other bans than before                  PublishMember of the banned, PublishWanted
SayGoodbye          with others in the mesh                 SignAnnouncement in state ``leaving``, GoodbyeSaid
MeshAdopted         another mesh                            everybody else is forgotten
Tick                load moved, a second ago at least       SignLoad
Tick                10 s since the last exchange            Send Digest to three
any                 membership changed                      PublishMember, PublishWanted, PersistPeers
==================  ======================================  =====================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.gossipd.anti_entropy import (
    DIGEST_ENTRIES,
    EXCHANGE_PEERS,
    EXCHANGE_SECONDS,
    bundles,
    compare,
    entry,
)
from services.gossipd.chance import number
from services.gossipd.load_record import load_record, moved
from services.gossipd.membership import Membership, MeshAdopted, PublishMember
from services.gossipd.records import Held, Refusal, Verify, signed_by_its_node
from services.gossipd.roster import Roster, TrustKnown
from services.gossipd.stimuli import Effect, GoodbyeSaid, LinksReplaced, Refuse, SayGoodbye, Send, SignLoad, Stimulus
from services.gossipd.suspicion import LATE_SECONDS
from services.gossipd.swim import CLAIM_JUMP_LIMIT, Tell
from shared import codec
from shared.errors import SchemaError
from shared.ids import PeerId
from shared.io.drive import Tick
from shared.messages.gossip import (
    Digest,
    PeerDown,
    PeerLeaving,
    Probe,
    ProbeAck,
    ProbeRequest,
    Records,
    RecordsWanted,
)
from shared.messages.mesh import (
    Announcement,
    DemandChanged,
    LoadRecord,
    MemberChanged,
    MeshIdentityChanged,
    RecordSigned,
    SignedRecord,
)
from shared.messages.trust import Grant
from shared.messages.tunnel import FromPeer, LinkChanged, PeerChannel

LOAD_SECONDS = 1.0
LOAD_NODES = 32
"""Each so many nodes a load record becomes rarer by a second, so that their sum stays bounded."""
REFUTE_SECONDS = 0.5
"""At most one refutation in so long: each costs a write and a signature."""
STAY_SECONDS = 15.0
"""A node that said goodbye and is still there then takes part again."""
REMINDER_SECONDS = 2.0
CATCH_UP_SECONDS = 3.0
"""After a restart nothing is told until the connected peers have told what they know, or for so long: what an earlier
life said stands meanwhile, so that a restart of gossipd alone never makes others look gone."""


class Gossip:
    """``known``: peers of before, with their addresses. ``seed``: for choices; another one at each start."""

    def __init__(
        self,
        membership: Membership,
        *,
        seed: int,
        known: Mapping[PeerId, tuple[str, ...]] | None = None,
        verify: Verify = signed_by_its_node,
    ) -> None:
        self.membership = membership
        self._seed = seed
        self._verify = verify
        self._known = dict(known or {})
        self._grant: Grant | None = None
        self._trust = TrustKnown()
        self._catch_up_until: float | None = None
        self._links_heard = False
        self._begin(self._known)

    def _begin(self, known: Mapping[PeerId, tuple[str, ...]]) -> None:
        identity = self.membership.identity
        self.roster = Roster(identity.peer_id, identity.mesh_id, self._seed, self._trust, self._verify)
        self.roster.remember(known)
        self._load: LoadRecord | None = None
        self._signed_load: SignedRecord | None = None
        self._load_seq = 0
        self._load_moved = True
        self._load_at: float | None = None
        self._exchange_at: float | None = None
        self._exchanged: dict[PeerId, float] = {}
        self._reminded: dict[PeerId, float] = {}
        self._refute_at: float | None = None
        self._refute_above = -1
        self._refuted_at = float("-inf")
        self._stay_at: float | None = None
        self._promised: float | None = None

    # -- the machine --------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        deadlines = [
            self.membership.next_deadline(),
            self.roster.next_deadline(),
            self._refute_at,
            self._stay_at,
            self._exchange_at if self.roster.swim.connected() else None,
            self._load_at if self._load_moved and self.roster.others() else None,
        ]
        return min((at for at in deadlines if at is not None), default=None)

    def handle(self, stimulus: Stimulus | Tick, *, now: float) -> list[Effect]:
        if self._promised is not None and now - self._promised > LATE_SECONDS:
            self.roster.swim.shift(now - self._promised, now)
        if self._catch_up_until is None:
            self._catch_up_until = now + CATCH_UP_SECONDS
        effects = self._handle(stimulus, now)
        effects += self.roster.news(now)
        if self._load_at is None and self.roster.others():
            self._load_at = now
        if self._exchange_at is None and self.roster.swim.connected():
            self._exchange_at = now + EXCHANGE_SECONDS
        deadline = self.next_deadline()
        # What is due already is due from now on: only a tick that comes later than that is late.
        self._promised = None if deadline is None else max(deadline, now)
        return effects

    def _handle(self, stimulus: Stimulus | Tick, now: float) -> list[Effect]:
        match stimulus:
            case Tick():
                return self._tick(now)
            case FromPeer():
                return self._from_peer(stimulus, now)
            case LinkChanged():
                return self._link(stimulus, now)
            case LinksReplaced(links=links):
                self._links_heard = True
                gone = self.roster.links.keys() - {link.peer_id for link in links}
                closed = [LinkChanged(peer_id=peer, state="closed", reason="it is gone") for peer in sorted(gone)]
                return [effect for link in (*closed, *links) for effect in self._link(link, now)]
            case TrustKnown():
                self._trust = stimulus
                self.roster.take_trust(stimulus, now)
                if stimulus.grant != self._grant:
                    self._grant = stimulus.grant
                    return [*self.membership.set_grant(stimulus.grant, now=now)]
                return []
            case SayGoodbye():
                return self._goodbye(now)
            case RecordSigned(record=record):
                return self._signed(record, now)
            case MeshAdopted():
                return self._adopt(stimulus, now)
        self._load_moved = True
        before = self.membership.identity
        effects: list[Effect] = [*self.membership.handle(stimulus, now=now)]
        after = self.membership.identity
        if (before.peer_id, before.mesh_id) != (after.peer_id, after.mesh_id):
            self._begin(self._known)
        return effects

    def caught_up(self, *, now: float) -> bool:
        """Whether enough is known of the others, since the start, to tell it: see ``CATCH_UP_SECONDS``."""
        if not self._known or (self._catch_up_until is not None and now >= self._catch_up_until):
            return True
        linked = self.roster.swim_links()
        return self._links_heard and bool(linked) and all(peer in self.roster.store.held for peer in linked)

    def snapshot(self, *, now: float) -> list[MeshIdentityChanged | MemberChanged | DemandChanged | codec.Message]:
        """Everything published, as one consistent copy."""
        wanted = [self.roster.wanted] if self.roster.wanted.peers else []
        return [*self.membership.snapshot(now=now), *self.roster.members(now), *wanted]

    def check_invariants(self) -> None:
        """Raises AssertionError when the machine contradicts itself."""
        self.membership.check_invariants()
        self.roster.check_invariants()
        if self._load is not None:
            assert self._load.seq == self._load_seq

    # -- this node's own word -----------------------------------------------------------------------------------

    def _adopt(self, stimulus: MeshAdopted, now: float) -> list[Effect]:
        other = stimulus.mesh_id != self.membership.identity.mesh_id
        effects: list[Effect] = []
        if other:
            effects += [PublishMember(member) for member in self.roster.farewell(now)]
            if self.membership.facts.leaving:
                # Back in the old mesh one day: that goodbye must not count then.
                effects += self.membership.refute(self.membership.identity.incarnation, now=now)
                self.membership.set_leaving(False, now=now)
        effects += self.membership.handle(stimulus, now=now)
        if other:
            self._known = {}
            self._trust = TrustKnown(grant=self._grant)
            links = list(self.roster.links.values())
            had_wanted = self.roster.wanted
            self._begin({})
            self.roster.wanted = had_wanted
            for link in links:
                effects += self._link(link, now)
        return effects

    def _signed(self, record: SignedRecord, now: float) -> list[Effect]:
        self.membership.handle(RecordSigned(record=record), now=now)
        connected = self.roster.swim_links()
        if record == self.membership.record:
            if self.membership.facts.leaving:
                goodbye = PeerLeaving(record=record)
                sent = [Send(connected, codec.encode(goodbye), "peer_leaving")] if connected else []
                return [*sent, GoodbyeSaid()]
        elif self._load is not None and record.payload == codec.encode(self._load):
            self._signed_load = record
        else:
            return []
        return self._send_records(connected, [record])

    def _goodbye(self, now: float) -> list[Effect]:
        if not self.roster.swim_links() or self.membership.own is None:
            return [GoodbyeSaid()]
        self._stay_at = now + STAY_SECONDS
        said = self.membership.set_leaving(True, now=now)
        return [*said] if said else [GoodbyeSaid()]

    def _refute(self, incarnation: int, now: float) -> list[Effect]:
        """Others hold something of this node as of ``incarnation`` that it has to outdo."""
        own = self.membership.identity.incarnation
        if not own <= incarnation <= own + CLAIM_JUMP_LIMIT or self.membership.facts.leaving:
            return []
        self._refute_above = max(self._refute_above, incarnation)
        at = self._refuted_at + REFUTE_SECONDS
        if now < at:
            self._refute_at = at
            return []
        self._refute_at, self._refuted_at = None, now
        above, self._refute_above = self._refute_above, -1
        return [*self.membership.refute(above, now=now)]

    def _say_load(self, now: float) -> list[Effect]:
        self._load_at = now + LOAD_SECONDS * max(1, -(-len(self.roster.others()) // LOAD_NODES))
        self._load_moved = False
        identity = self.membership.identity
        made = load_record(
            identity,
            self._load_seq + 1,
            self.membership.slots.values(),
            self.membership.demand.totals_of(identity.peer_id),
            self.roster.rtts(),
        )
        if self._load is not None and not moved(made, self._load) and self._load.incarnation == identity.incarnation:
            return []
        self._load_seq += 1
        self._load = made
        return [SignLoad(made)]

    # -- links and time -----------------------------------------------------------------------------------------

    def _link(self, link: LinkChanged, now: float) -> list[Effect]:
        came, told = self.roster.link(link, now)
        self._load_moved = True
        effects = self._told(told)
        if came:
            effects += self._greet(link.peer_id)
            self._exchanged[link.peer_id] = now
        return effects

    def _greet(self, peer_id: PeerId) -> list[Effect]:
        own = self.membership.record
        mine = [record for record in (own, self._signed_load) if record is not None]
        return [*self._send_records((peer_id,), mine), *self._send((peer_id,), self._digest())]

    def _tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        at = self.membership.next_deadline()
        if at is not None and now >= at:
            effects += self.membership.handle(Tick(), now=now)
        if self._stay_at is not None and now >= self._stay_at:
            self._stay_at = None
            if self.membership.facts.leaving:
                self.membership.set_leaving(False, now=now)
                effects += self.membership.refute(self.membership.identity.incarnation, now=now)
        if self._refute_at is not None and now >= self._refute_at:
            effects += self._refute(self._refute_above, now)
            self._refute_at = self._refute_at if self._refute_at is not None and self._refute_at > now else None
        if self._load_at is not None and now >= self._load_at and self._load_moved and self.roster.others():
            effects += self._say_load(now)
        if self._exchange_at is not None and now >= self._exchange_at:
            self._exchange_at = None
            effects += self._exchange(now)
        told, going = self.roster.tick(now)
        effects += self._told(told)
        for to, origins, only_load in going:
            effects += self._send_records((to,), self.roster.store.bundle(origins, loads_only=only_load))
        return effects

    def _exchange(self, now: float) -> list[Effect]:
        """With those first that waited longest, so that everybody connected has its turn."""
        connected = self.roster.swim.connected()
        order = sorted(
            connected,
            key=lambda peer: (
                self._exchanged.get(peer, float("-inf")),
                number(self._seed, peer, self._exchanged.get(peer)),
            ),
        )
        chosen = tuple(order[:EXCHANGE_PEERS])
        self._exchanged = {peer: at for peer, at in self._exchanged.items() if peer in connected}
        self._exchanged.update(dict.fromkeys(chosen, now))
        self.roster.forget_old(now)
        return self._send(chosen, self._digest())

    # -- what peers say -----------------------------------------------------------------------------------------

    def _from_peer(self, said: FromPeer, now: float) -> list[Effect]:
        sender = said.peer_id
        if sender in self._trust.banned:
            return [Refuse("banned", sender, "it is banned from this mesh")]
        try:
            message = codec.decode(said.payload)
        except SchemaError as error:
            return [Refuse("malformed", sender, error.detail)]
        self.roster.grants[sender] = said.grant
        self.roster.swim.heard(sender, now)
        effects = self._remind(sender, now)
        match message:
            case Probe():
                effects += self._told(self.roster.swim.on_probe(sender, message))
            case ProbeRequest():
                effects += self._told(self.roster.swim.on_request(sender, message, now))
            case ProbeAck():
                effects += self._told(self.roster.swim.on_ack(sender, message, now))
            case PeerDown():
                effects += self._claim(sender, said.grant, message, now)
            case Records(records=records):
                effects += [effect for record in records for effect in self._record(sender, record, now)]
            case PeerLeaving(record=record):
                effects += self._record(sender, record, now)
            case Digest():
                effects += self._on_digest(sender, message, now)
            case RecordsWanted(peers=peers):
                everything = self._everything()
                known = [everything[peer] for peer in peers[:DIGEST_ENTRIES] if peer in everything]
                effects += self._send_records((sender,), _both(known))
            case _:
                effects.append(Refuse("not_for_gossip", sender, f"a {type(message).__name__} is not for gossipd"))
        return effects

    def _remind(self, sender: PeerId, now: float) -> list[Effect]:
        """One that is held dead and speaks has not heard of it: it has to refute."""
        peer = self.roster.swim.peers.get(sender)
        if peer is None or peer.state not in ("dead", "left"):
            return []
        if now - self._reminded.get(sender, float("-inf")) < REMINDER_SECONDS:
            return []
        self._reminded[sender] = now
        return self._send((sender,), self._down(sender, "dead"), "peer_down")

    def _down(self, subject: PeerId, state: str) -> PeerDown:
        return PeerDown(
            accuser=self.membership.identity.peer_id,
            subject=subject,
            incarnation=self.roster.swim.peers[subject].incarnation,
            state="dead" if state == "dead" else "suspect",
        )

    def _claim(self, sender: PeerId, grant: Grant, claim: PeerDown, now: float) -> list[Effect]:
        if claim.subject == self.membership.identity.peer_id:
            return self._refute(claim.incarnation, now)
        if grant not in ("member", "issuer") and sender not in self._trust.trusted:
            return [Refuse("claim_of_guest", sender, f"a {grant} does not say who is down")]
        return self._told(self.roster.swim.on_claim(sender, claim, now))

    def _record(self, sender: PeerId, record: SignedRecord, now: float) -> list[Effect]:
        if record.peer_id == self.membership.identity.peer_id or record.peer_id in self._trust.banned:
            return []
        said = self.roster.store.take(record)
        if isinstance(said, Refusal):
            return [] if said.code == "old" else [Refuse(said.code, sender, said.reason)]
        if isinstance(said, Announcement):
            self.roster.announced(said, sender, now)
            link = self.roster.links.get(said.peer_id)
            return self._told(self.roster.link(link, now)[1]) if link else []
        self._take_load(said, sender, now)
        return []

    def _take_load(self, said: LoadRecord, sender: PeerId, now: float) -> None:
        demand = self.membership.demand
        first = not self.roster.loaded(said, sender, now)
        if first:
            # Counted before this node heard of it: for the totals, not for the rates.
            demand.restore(said.peer_id, {item.model: item.requests_total for item in said.demand})
        else:
            for item in said.demand:
                demand.merge(said.peer_id, item.model, item.requests_total, now=now)
        if said.demand:
            self.membership.demand_changed(now)

    def _everything(self) -> dict[PeerId, Held]:
        own, record = self.membership.own, self.membership.record
        if own is None or record is None:
            return self.roster.store.held
        mine = Held(record, own, self._signed_load, self._load if self._signed_load else None)
        return {own.peer_id: mine, **self.roster.store.held}

    def _digest(self) -> Digest:
        states = self.roster.states()
        entries = [entry(held, states.get(peer_id, "alive")) for peer_id, held in sorted(self._everything().items())]
        return Digest(mesh_id=self.membership.identity.mesh_id, entries=tuple(entries))

    def _on_digest(self, sender: PeerId, digest: Digest, now: float) -> list[Effect]:
        if digest.mesh_id != self.membership.identity.mesh_id:
            return [Refuse("wrong_mesh", sender, f"a digest of mesh {digest.mesh_id[:64] or '(none)'}")]
        if len(digest.entries) > DIGEST_ENTRIES:
            return [Refuse("too_large", sender, f"a digest of {len(digest.entries)} nodes")]
        everything = self._everything()
        own = self.membership.identity
        effects: list[Effect] = []
        for theirs in digest.entries:
            peer = self.roster.swim.peers.get(theirs.peer_id)
            if theirs.peer_id == own.peer_id:
                mine = everything.get(own.peer_id)
                behind = mine is not None and (theirs.incarnation, theirs.seq) > mine.number
                if theirs.state in ("suspect", "dead", "left") or behind or theirs.load_incarnation > own.incarnation:
                    effects += self._refute(max(theirs.incarnation, theirs.load_incarnation), now)
            elif peer is None:
                if theirs.state == "dead":
                    self.roster.down_before_known(theirs.peer_id, theirs.incarnation)
            elif theirs.state == "dead" and peer.state == "alive" and theirs.incarnation >= peer.incarnation:
                # Perhaps old news: it gets the time to refute that every suspected node has.
                claim = PeerDown(
                    accuser=sender, subject=theirs.peer_id, incarnation=theirs.incarnation, state="suspect"
                )
                effects += self._told(self.roster.swim.on_claim(sender, claim, now))
            elif peer.state == "dead" and theirs.state == "alive" and peer.incarnation >= theirs.incarnation:
                effects += self._send((sender,), self._down(theirs.peer_id, "suspect"), "peer_down")
        difference = compare(everything, digest.entries)
        effects += self._send_records((sender,), _both(everything[peer] for peer in difference.newer_here))
        wanted = tuple(peer for peer in difference.wanted if peer != own.peer_id and peer not in self._trust.banned)
        if wanted:
            effects += self._send((sender,), RecordsWanted(peers=wanted))
        return effects

    # -- sending ------------------------------------------------------------------------------------------------

    def _told(self, told: Iterable[Tell]) -> list[Effect]:
        return [effect for item in told for effect in self._send(item.peers, item.message, item.channel)]

    def _send(self, peers: tuple[PeerId, ...], message: object, channel: PeerChannel = "gossip") -> list[Effect]:
        return [Send(peers, codec.encode(message), channel)] if peers else []

    def _send_records(self, peers: tuple[PeerId, ...], records: Iterable[SignedRecord]) -> list[Effect]:
        return [effect for piece in bundles(records) for effect in self._send(peers, Records(records=piece))]


def _both(known: Iterable[Held]) -> list[SignedRecord]:
    held = list(known)
    return [item.signed for item in held] + [item.signed_load for item in held if item.signed_load is not None]
