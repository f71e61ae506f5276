"""ENROLL, both ends: how a node without a certificate gets one.

The one who joins dials the token's addresses, accepts only a server whose chain ends in the pinned root, and sends the
invite with a signed request for its node key. The one who is asked hands both to its gossipd, which decides.

Source: docs/spec/joining.md, docs/spec/invites.md.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.tunneld.framing import FrameReader, OpeningReader, StreamType, encode_frame, encode_opening
from services.tunneld.io.stream import TunnelStream
from shared import codec
from shared.certificates import fingerprint, load_der, make_csr, verify_chain
from shared.errors import CertificateRefused, MeshError, PeerUnreachable, RequestRefused, SchemaError
from shared.io import log
from shared.messages.daemon import Refused
from shared.messages.trust import EnrollAt, Enrolled, RedeemInvite
from shared.multiaddrs import Address, dial_order, parse_addresses
from shared.peer_ids import peer_id_of

STAGGER_SECONDS = 0.5
"""Between two addresses: a handshake on a long path takes about so long."""
EXCHANGE_SECONDS = 15.0
"""From the dial to the certificate, per address."""
MESSAGE_LIMIT_BYTES = 256 * 1024
"""A request has about 1 KiB; the answer lists peers."""
ENROLMENTS_AT_ONCE = 16

DialEnroll = Callable[[Address, str], Awaitable[TunnelStream]]
"""``(address, root fingerprint) -> stream``. Raises PeerUnreachable, CertificateRefused."""
Redeem = Callable[[RedeemInvite], Awaitable[codec.Message]]


async def enroll(request: EnrollAt, key: Ed25519PrivateKey, dial: DialEnroll) -> Enrolled:
    """Try the addresses, nearest first, until one admits or refuses.

    Raises: RequestRefused with the issuer's own refusal; PeerUnreachable when nobody answered; CertificateRefused when
    only strangers did.
    """
    addresses = [item for item in dial_order(parse_addresses(request.addresses)) if item.transport == "quic"]
    if not addresses:
        raise PeerUnreachable("the token names no address that can be dialled over QUIC; ask for a new token")
    failures: dict[Address, MeshError] = {}
    running: dict[asyncio.Task[Enrolled], Address] = {}
    waiting = list(addresses)
    try:
        while waiting or running:
            if waiting:
                address = waiting.pop(0)
                running[asyncio.create_task(_enroll_one(request, key, dial, address))] = address
            done, _ = await asyncio.wait(
                running, timeout=STAGGER_SECONDS if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                address = running.pop(task)
                try:
                    return task.result()
                except RequestRefused:
                    raise
                except MeshError as error:
                    failures[address] = error
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    words = "; ".join(f"{address}: {error.detail}" for address, error in failures.items())
    strangers = [error for error in failures.values() if isinstance(error, CertificateRefused)]
    if strangers:
        raise CertificateRefused(words)
    raise PeerUnreachable(words)


async def _enroll_one(request: EnrollAt, key: Ed25519PrivateKey, dial: DialEnroll, address: Address) -> Enrolled:
    try:
        async with asyncio.timeout(EXCHANGE_SECONDS):
            stream = await dial(address, request.root_fingerprint)
            try:
                redeem = RedeemInvite(
                    invite=request.invite,
                    csr_der=make_csr(key),
                    client=request.client,
                    issuer_csr_der=request.issuer_csr_der,
                )
                await stream.write(encode_opening(StreamType.ENROLL, {}) + encode_frame(codec.encode(redeem)))
                await stream.finish()
                answer = codec.decode(await read_frame(stream, FrameReader(MESSAGE_LIMIT_BYTES)))
            finally:
                stream.abort("done")
    except TimeoutError:
        raise PeerUnreachable(f"no answer within {EXCHANGE_SECONDS:g} s") from None
    except SchemaError as error:
        raise PeerUnreachable(f"it answered something unreadable: {error.detail}") from error
    match answer:
        case Enrolled():
            check_enrolled(answer, request.root_fingerprint, key)
            return answer
        case Refused():
            raise RequestRefused(answer.code, answer.detail, answer.retry_after_seconds)
    raise PeerUnreachable(f"it answered {type(answer).__name__} to a request to enrol")


def check_enrolled(enrolled: Enrolled, root_fingerprint: str, key: Ed25519PrivateKey) -> None:
    """The certificate is ours, under the pinned root. Raises: CertificateRefused."""
    root = load_der(enrolled.root_der)
    if fingerprint(root) != root_fingerprint:
        raise CertificateRefused("the mesh root it sent is not the one in the token")
    peer = verify_chain(
        [load_der(part) for part in enrolled.chain_der],
        root,
        mesh_id=enrolled.mesh_id,
        now=datetime.datetime.now(datetime.UTC),
    )
    if peer.peer_id != peer_id_of(key.public_key().public_bytes_raw()):
        raise CertificateRefused("the certificate it sent is for another node's key")
    if peer.grant != enrolled.grant:
        raise CertificateRefused(f"the certificate says {peer.grant}, the answer says {enrolled.grant}")


async def read_frame(stream: TunnelStream, reader: FrameReader, first: bytes = b"") -> bytes:
    """The next frame of a stream. Raises: SchemaError when there is none, StreamLost."""
    data = first
    while True:
        frames = reader.feed(data)
        if frames:
            return frames[0]
        data = await stream.read()
        if not data:
            reader.finish()
            raise SchemaError("the stream ended before a message came")


class EnrolmentDesk:
    """Answers those who want to join. ``redeem`` asks this node's gossipd."""

    def __init__(self, redeem: Redeem, count: Callable[[str], None]) -> None:
        self._redeem = redeem
        self._count = count
        self._running = 0
        self._refused = log.LogOnce()

    async def serve(self, stream: TunnelStream, observed_address: str) -> None:
        """One enrolment, whatever the other end does. Never raises a MeshError."""
        if self._running >= ENROLMENTS_AT_ONCE:
            self._count("enrolments_refused")
            stream.abort("too many enrolments at once; try again in a moment")
            return
        self._running += 1
        try:
            async with asyncio.timeout(EXCHANGE_SECONDS):
                request = await self._read(stream)
                answer = await self._decide(request, observed_address)
                await stream.write(encode_frame(codec.encode(answer)))
                await stream.finish()
                # The one who enrols closes: closing first could overtake the answer.
                while await stream.read():
                    pass
        except (MeshError, TimeoutError) as error:
            reason = error.detail if isinstance(error, MeshError) else "it took too long"
            self._count("enrolments_failed")
            self._refused(f"failed {reason}", "enrolment_failed", remote=observed_address, reason=reason)
            stream.abort(reason)
        finally:
            self._running -= 1

    @staticmethod
    async def _read(stream: TunnelStream) -> RedeemInvite:
        opening = OpeningReader()
        while (head := opening.feed(await _some(stream))) is None:
            pass
        if head.type is not StreamType.ENROLL:
            raise SchemaError(f"a {head.type.name} stream came where only ENROLL is allowed")
        payload = await read_frame(stream, FrameReader(MESSAGE_LIMIT_BYTES), opening.rest)
        request = codec.decode(payload)
        if not isinstance(request, RedeemInvite):
            raise SchemaError(f"{type(request).__name__} came where RedeemInvite was due")
        return request

    async def _decide(self, request: RedeemInvite, observed_address: str) -> codec.Message:
        asked = replace(request, observed_address=observed_address)
        try:
            return await self._redeem(asked)
        except RequestRefused as error:
            self._count("enrolments_refused")
            self._refused(
                f"{error.code} {error.detail}",
                "enrolment_refused",
                remote=observed_address,
                code=error.code,
                reason=error.detail,
            )
            return Refused(code=error.code, detail=error.detail, retry_after_seconds=error.retry_after_seconds)
        except MeshError as error:
            return Refused(code=error.code, detail=error.detail)


async def _some(stream: TunnelStream) -> bytes:
    data = await stream.read()
    if not data:
        raise SchemaError("the stream ended before it began")
    return data
