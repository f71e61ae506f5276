"""What the mesh's issuers decided about peers and invites: bans, trusted guests, revoked and redeemed invites.

Each decision is a claim, signed by the issuer key that made it (or the mesh's root key itself) and forwarded byte for
byte, so that any node can check it and no node can change it. Of each issuer the highest version of a claim counts, so
that merging is idempotent and in any order, and a decision can be taken back by a higher version.

Who counts: a claim of the root key outranks those of issuers, whatever their versions; nobody decides about itself; of
an issuer that is banned only what takes something away still counts (its redemptions and revocations). Among issuers
the highest ``(version, issuer)`` wins. All of it depends on the set of claims only: every node comes to the same view.

Source: docs/spec/trust.md 8-14.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from shared import codec
from shared.certificates import check_issuer, load_der
from shared.errors import CertificateRefused, SchemaError
from shared.ids import InviteId, MeshId, PeerId
from shared.messages.trust import SignedClaim, TrustStatement

ClaimKind = Literal["banned", "trusted", "revoked", "redeemed"]
ROOT = PeerId("")
"""Who speaks with the mesh's root key."""
CLAIMS_LIMIT = 20_000
"""Kept at most; a claim has about 250 bytes."""
STATEMENT_CLAIMS = 200
"""In one message: about 40 KiB."""
SUBJECT_CHARACTERS = 256
VERSION_LIMIT = 2**53


@dataclass(frozen=True, slots=True)
class Claim:
    """What was signed."""

    mesh_id: MeshId
    kind: ClaimKind
    subject: str
    """A peer id, an invite id, or ``INVITE/PEER`` of a redemption."""
    version: int
    value: bool
    until_unix_seconds: int = 0
    """When it may be forgotten; 0: never."""

    def to_body(self) -> bytes:
        return codec.pack([self.mesh_id, self.kind, self.subject, self.version, self.value, self.until_unix_seconds])

    @classmethod
    def from_body(cls, body: bytes) -> Claim:
        """Raises: SchemaError."""
        match codec.unpack(body):
            case [str(mesh_id), str(kind), str(subject), int(version), bool(value), int(until)] if (
                0 < len(subject) <= SUBJECT_CHARACTERS and 0 < version <= VERSION_LIMIT and until >= 0
            ):
                for known in get_args(ClaimKind):
                    if kind == known:
                        return cls(MeshId(mesh_id), known, subject, version, value, until)
        raise SchemaError("a claim that this version of meshd does not know")


@dataclass(frozen=True, slots=True)
class HeldClaim:
    """A claim with what proves it."""

    claim: Claim
    by: PeerId
    body: bytes
    signature: bytes
    issuer_der: bytes


@dataclass(frozen=True, slots=True)
class Signer:
    """With what this node signs: its issuer key, or as the creator the root key (``by`` is ``ROOT`` then)."""

    by: PeerId
    key: ec.EllipticCurvePrivateKey
    issuer_der: bytes = b""


class Claims:
    """All claims that are known of one mesh. No clock, no chance."""

    def __init__(self, mesh_id: MeshId, root: x509.Certificate) -> None:
        self.mesh_id = mesh_id
        self._root = root
        self._held: dict[tuple[str, str, PeerId], HeldClaim] = {}
        self._issuers: dict[bytes, x509.Certificate] = {}
        self.refused: Counter[str] = Counter()
        """Why claims were not taken, with how often."""
        self.banned: frozenset[PeerId] = frozenset()
        self.trusted: frozenset[PeerId] = frozenset()
        self.revoked: frozenset[InviteId] = frozenset()
        self.redeemed: dict[InviteId, frozenset[PeerId]] = {}

    def __len__(self) -> int:
        return len(self._held)

    # -- making and taking ----------------------------------------------------------------------------------------

    def decide(
        self, kind: ClaimKind, subject: str, value: bool, signer: Signer, *, until_unix_seconds: int = 0
    ) -> HeldClaim | None:
        """A new claim of this node's; None when it would say what its last one says already."""
        same = [held for (known, about, _), held in self._held.items() if (known, about) == (kind, subject)]
        mine = self._held.get((kind, subject, signer.by))
        newest = max((held.claim.version for held in same), default=0)
        if mine is not None and mine.claim.value == value and mine.claim.version == newest:
            return None
        claim = Claim(self.mesh_id, kind, subject, newest + 1, value, until_unix_seconds)
        body = claim.to_body()
        made = HeldClaim(claim, signer.by, body, signer.key.sign(body, ec.ECDSA(hashes.SHA256())), signer.issuer_der)
        self._held[kind, subject, signer.by] = made
        self._evaluate()
        return made

    def decided_by_root(self, kind: ClaimKind, subject: str) -> bool:
        """Whether the creator's word stands, which no other issuer can change."""
        return (kind, subject, ROOT) in self._held

    def holds(self, kind: ClaimKind, subject: str) -> bool:
        """Whether it counts as true now."""
        match kind:
            case "banned":
                return subject in self.banned
            case "trusted":
                return subject in self.trusted
            case "revoked":
                return subject in self.revoked
            case "redeemed":
                invite_id, _, peer_id = subject.partition("/")
                return peer_id in self.redeemed.get(InviteId(invite_id), ())

    def merge(self, statement: TrustStatement) -> tuple[HeldClaim, ...]:
        """Take what is new and properly signed; what was new. Raises: CertificateRefused for another mesh's."""
        if statement.mesh_id != self.mesh_id:
            self.refused["another mesh"] += 1
            raise CertificateRefused(f"a statement of mesh {statement.mesh_id[:64]}, not of {self.mesh_id}")
        taken = []
        for signed in statement.claims[:STATEMENT_CLAIMS]:
            try:
                held = self._check(signed, statement.issuers)
            except (CertificateRefused, SchemaError) as error:
                self.refused[error.detail] += 1
                continue
            if held is not None:
                self._held[held.claim.kind, held.claim.subject, held.by] = held
                taken.append(held)
        if taken:
            self._evaluate()
        return tuple(taken)

    def _check(self, signed: SignedClaim, issuers: tuple[bytes, ...]) -> HeldClaim | None:
        """The claim, if it is new. Raises: CertificateRefused, SchemaError."""
        claim = Claim.from_body(signed.body)
        if claim.mesh_id != self.mesh_id:
            raise CertificateRefused("a claim about another mesh")
        public_key: object = self._root.public_key()
        by, der = ROOT, b""
        if signed.issuer != -1:
            if not 0 <= signed.issuer < len(issuers):
                raise SchemaError("a claim without its issuer")
            der = issuers[signed.issuer]
            by, public_key = self._issuer(der)
        known = self._held.get((claim.kind, claim.subject, by))
        # An issuer that was restored from a backup may say two things under one version: one of them wins everywhere.
        if known is not None and (known.claim.version, known.body) >= (claim.version, signed.body):
            return None
        if known is None and len(self._held) >= CLAIMS_LIMIT:
            raise CertificateRefused(f"more than {CLAIMS_LIMIT} claims")
        if by and claim.subject == by:
            raise CertificateRefused("an issuer decides about itself")
        if not isinstance(public_key, ec.EllipticCurvePublicKey):
            raise CertificateRefused("a claim signed with a key of an unexpected kind")
        try:
            public_key.verify(signed.signature, signed.body, ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
            raise CertificateRefused("a claim that its issuer did not sign") from None
        return HeldClaim(claim, by, signed.body, signed.signature, der)

    def _issuer(self, der: bytes) -> tuple[PeerId, object]:
        """Raises: CertificateRefused."""
        certificate = self._issuers.get(der) or load_der(der)
        # A decision outlives the certificate it was signed under: its dates do not matter here.
        peer_id = check_issuer(certificate, self._root, now=certificate.not_valid_before_utc)
        if len(self._issuers) < CLAIMS_LIMIT:
            self._issuers[der] = certificate
        return peer_id, certificate.public_key()

    def forget_old(self, *, now_unix_seconds: float) -> bool:
        """Drop what may be forgotten; whether there was something."""
        old = [key for key, held in self._held.items() if 0 < held.claim.until_unix_seconds < now_unix_seconds]
        for key in old:
            del self._held[key]
        if old:
            self._evaluate()
        return bool(old)

    # -- what follows from them -------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        by_root = frozenset(self._subjects("banned", only_root=True))
        self.banned = frozenset(PeerId(subject) for subject in self._subjects("banned", without=by_root))
        self.trusted = frozenset(PeerId(subject) for subject in self._subjects("trusted", without=self.banned))
        self.revoked = frozenset(InviteId(subject) for subject in self._subjects("revoked"))
        redeemed: dict[InviteId, set[PeerId]] = {}
        for subject in self._subjects("redeemed"):
            invite_id, _, peer_id = subject.partition("/")
            redeemed.setdefault(InviteId(invite_id), set()).add(PeerId(peer_id))
        self.redeemed = {invite_id: frozenset(peers) for invite_id, peers in redeemed.items()}

    def _subjects(self, kind: ClaimKind, *, without: Iterable[str] = (), only_root: bool = False) -> list[str]:
        """Of whom ``kind`` is true, not counting what the issuers in ``without`` say."""
        silent = frozenset(without)
        best: dict[str, HeldClaim] = {}
        for (known, subject, by), held in self._held.items():
            if known != kind or by in silent or (only_root and by != ROOT):
                continue
            other = best.get(subject)
            if other is None or _rank(held) > _rank(other):
                best[subject] = held
        return sorted(subject for subject, held in best.items() if held.claim.value)

    # -- telling others ---------------------------------------------------------------------------------------------

    def statements(self, held: Iterable[HeldClaim] | None = None) -> list[TrustStatement]:
        """Messages with these claims, or with all of them."""
        items = sorted(
            self._held.values() if held is None else held,
            key=lambda item: (item.claim.kind, item.claim.subject, item.by),
        )
        made = []
        for start in range(0, len(items), STATEMENT_CLAIMS):
            part = items[start : start + STATEMENT_CLAIMS]
            issuers = tuple(sorted({item.issuer_der for item in part if item.by != ROOT}))
            claims = tuple(
                SignedClaim(
                    body=item.body,
                    signature=item.signature,
                    issuer=-1 if item.by == ROOT else issuers.index(item.issuer_der),
                )
                for item in part
            )
            made.append(TrustStatement(mesh_id=self.mesh_id, issuers=issuers, claims=claims))
        return made


def _rank(held: HeldClaim) -> tuple[bool, int, str]:
    return held.by == ROOT, held.claim.version, held.by
