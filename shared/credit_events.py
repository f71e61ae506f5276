"""What the credit book is told and what it wants done: two unions beside their machine, ``credits.CreditBook``."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.ids import ModelName, RequestId, SlotId
from shared.messages.leases import CreditUse, LeaseGranted

Ticket = int
"""A waiting request, numbered by the shell."""


@dataclass(slots=True, eq=False)
class Held:
    """This holder's share of one slot."""

    slot_id: SlotId
    model: ModelName
    base_url: str
    api_key: str = field(repr=False)
    parallel: int
    credits: int = 0
    in_use: int = 0
    started_total: int = 0
    last_use: float = 0.0
    recalled_at: float | None = None
    suspect: bool = False
    gone: bool = False
    changed: int = 0
    """Number of the report that first shows the newest change."""

    @property
    def giving_back(self) -> bool:
        return self.recalled_at is not None or self.suspect


# -- stimuli -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request that ``start`` could not serve: wait. Answered by one ``Started`` or ``Refuse``."""

    ticket: Ticket
    request_id: RequestId
    model: ModelName


@dataclass(frozen=True, slots=True)
class Unwanted:
    """The client of a waiting request went away."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Suspected:
    """The slot's engine refused or cut a connection."""

    slot_id: SlotId


@dataclass(frozen=True, slots=True)
class AcquireGranted:
    acquire_id: RequestId
    grant: LeaseGranted


@dataclass(frozen=True, slots=True)
class AcquireRefused:
    acquire_id: RequestId
    code: str
    detail: str
    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ReportConfirmed:
    number: int
    revoked: tuple[SlotId, ...]
    recalled: tuple[SlotId, ...]


@dataclass(frozen=True, slots=True)
class Recalled:
    """launcherd's publication, addressed to this holder."""

    slot_id: SlotId
    active: bool


@dataclass(frozen=True, slots=True)
class SlotEnded:
    """launcherd published that the slot no longer serves; ``for_good`` when its id will not come back."""

    slot_id: SlotId
    for_good: bool


@dataclass(frozen=True, slots=True)
class LauncherdBooted:
    """A new launcherd answers: it must learn at once what is held."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The core's own deadline has come."""


Stimulus = (
    Wanted
    | Unwanted
    | Suspected
    | AcquireGranted
    | AcquireRefused
    | ReportConfirmed
    | Recalled
    | SlotEnded
    | LauncherdBooted
    | Tick
)

# -- effects -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    ticket: Ticket
    held: Held


@dataclass(frozen=True, slots=True)
class Refuse:
    ticket: Ticket
    code: str
    detail: str
    retry_after_seconds: float | None


@dataclass(frozen=True, slots=True)
class SendAcquire:
    """Ends in ``AcquireGranted`` or ``AcquireRefused``, also when withdrawn meanwhile."""

    acquire_id: RequestId
    model: ModelName


@dataclass(frozen=True, slots=True)
class SendWithdraw:
    acquire_id: RequestId


@dataclass(frozen=True, slots=True)
class SendReport:
    """Ends in ``ReportConfirmed``, or in nothing when launcherd does not answer."""

    number: int
    uses: tuple[CreditUse, ...]


@dataclass(frozen=True, slots=True)
class SendReturn:
    return_id: RequestId
    slot_id: SlotId
    count: int


Effect = Started | Refuse | SendAcquire | SendWithdraw | SendReport | SendReturn
