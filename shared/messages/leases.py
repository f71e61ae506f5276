"""Leases: no byte reaches an engine without one. launcherd grants them, proxyd and tunneld hold them.

A holder keeps *credit*: the right to run ``credits`` requests at once on one slot. Every request in flight
uses one. Credits of one slot sum to at most its ``parallel``. A holder that has a free credit, and has not been
asked to give it back, starts a request at once and reports it with its next :class:`ReportCredits`; otherwise
it asks with :class:`AcquireLease` and launcherd answers in the order of arrival.

=================  =====================================================================================
``AcquireLease``   wait in launcherd's queue for one credit, loading the model first if need be
``WithdrawAcquire`` the client went away, or an own free credit served the request: leave the queue
``ReportCredits``  once a second, at once after idle->busy and busy->idle, and at once to a new launcherd
``ReturnCredits``  give unused ones back: asked by ``CreditsRecalled``, or idle for ``credit_idle_seconds``
=================  =====================================================================================

A holder that has not reported for 5 s is dead and its credits lapse. While launcherd restarts, granted credits
stay good for 10 s; a new launcherd evicts nothing until that time has passed since it started.
"""

from __future__ import annotations

from shared.ids import HolderId, ModelName, RequestId, SlotId
from shared.messages.registry import message, part

HOLDER_TIMEOUT_SECONDS = 5.0
CREDIT_GRACE_SECONDS = 10.0
REPORT_SECONDS = 1.0


@message
class AcquireLease:
    """Request: one credit on ``model``. Reply ``LeaseGranted`` (perhaps after a load), or ``Refused`` with
    code ``model_not_found``, ``overloaded`` (queue full), ``load_failed``, ``model_too_large``, ``idle`` ….
    The request waits as long as its deadline; the holder withdraws it when its client goes away."""

    holder: HolderId
    request_id: RequestId
    model: ModelName
    load: bool = True
    """Load the model if it is not; otherwise refuse with ``not_loaded``."""


@message
class WithdrawAcquire:
    """Request: take ``request_id`` out of the queue. Harmless when it is not in it. Reply ``Done``."""

    holder: HolderId
    request_id: RequestId


@message
class LeaseGranted:
    """``credits`` (at least one, for the request that asked) on ``slot_id``, usable at ``base_url``."""

    model: ModelName
    slot_id: SlotId
    base_url: str
    """``http://127.0.0.1:PORT``, no trailing slash."""
    api_key: str
    credits: int
    parallel: int
    queued_seconds: float = 0.0


@part
class CreditUse:
    slot_id: SlotId
    model: ModelName
    credits: int
    in_use: int
    started_total: int
    """Requests started on this slot by this holder since it got its first credit."""
    last_use_age_seconds: float
    waiting: int = 0


@message
class ReportCredits:
    """Request: everything this holder holds, whole list. Reply ``CreditsConfirmed``."""

    holder: HolderId
    daemon: str
    pid: int
    uses: tuple[CreditUse, ...]


@message
class CreditsConfirmed:
    """``revoked``: slots that are gone; the holder forgets its credits there (requests in flight run on)."""

    revoked: tuple[SlotId, ...] = ()
    recalled: tuple[SlotId, ...] = ()


@message
class ReturnCredits:
    """Request: ``count`` unused credits go back. Reply ``Done``. Repeating ``request_id`` is harmless."""

    holder: HolderId
    request_id: RequestId
    slot_id: SlotId
    count: int


@message
class CreditsRecalled:
    """launcherd publishes: return unused credits on this slot at once and each used one as it frees.

    ``reason`` is ``waiting`` (another holder waits) or ``draining`` (the model is to be unloaded).
    ``active`` false ends the recall.
    """

    slot_id: SlotId
    holder: HolderId
    reason: str
    active: bool = True


@message
class EngineSuspected:
    """A holder saw an engine refuse or go silent: probe it now. Reply ``Done``."""

    slot_id: SlotId
    detail: str
