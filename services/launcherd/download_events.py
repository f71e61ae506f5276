"""What the downloads are told and what they want done: two closed unions beside their machine, `downloads.Downloads`.

Requests come with a token; exactly one `DownloadReply` answers each token, whatever happens, unless its caller went
away. A job is one run of the download process; `DownloadEnded` is the last word about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from shared.ids import ModelName
from shared.messages.daemon import Done, Refused
from shared.messages.downloads import DownloadChanged

DownloadToken = NewType("DownloadToken", int)
JobId = NewType("JobId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A model to be fetched: everything that outlives launcherd."""

    name: ModelName
    checkpoint: str
    recipe: str = "llamacpp"
    labels: tuple[str, ...] = ()
    mmproj: str = ""
    register: bool = False
    """It becomes an entry of the user's when it is there; the built-in catalog does not know it."""


# -- stimuli -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PullAsked:
    token: DownloadToken
    wanted: Wanted
    wait: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAsked:
    token: DownloadToken
    name: ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class AskerGone:
    """Nobody waits for this token's reply any more; the download goes on."""

    token: DownloadToken


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadsRestored:
    """What an earlier launcherd had not finished."""

    pending: tuple[Wanted, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadPlanned:
    """The hub has said what is to be fetched. `bytes_done` is what was there already."""

    job: JobId
    file_count: int
    bytes_total: int
    bytes_done: int
    checkpoint: str
    """With the quantisation that was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadProgressed:
    job: JobId
    file: str
    file_index: int
    bytes_done: int
    verifying: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadSucceeded:
    """Every file is whole, verified and in place."""

    job: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadFailed:
    """`transient`: the same may succeed later; decided by the type of the error, never by its words."""

    job: JobId
    code: str
    detail: str
    transient: bool
    retry_after_seconds: float = 0.0
    """What the server asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadEnded:
    """The process is gone. Without a success or failure before it, it died: `how` completes "the download …"."""

    job: JobId
    how: str = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInstalled:
    """The answer to `InstallModel`: the inventory knows it. `reason` says why it does not, if so."""

    name: ModelName
    reason: str = ""


DownloadStimulus = (
    PullAsked
    | CancelAsked
    | AskerGone
    | DownloadsRestored
    | DownloadPlanned
    | DownloadProgressed
    | DownloadSucceeded
    | DownloadFailed
    | DownloadEnded
    | ModelInstalled
)


# -- effects -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDownload:
    """Ends in `DownloadEnded`."""

    job: JobId
    wanted: Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class StopDownload:
    """Ends in `DownloadEnded`."""

    job: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallModel:
    """Register it and read the folders again. Ends in `ModelInstalled`."""

    wanted: Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadReply:
    token: DownloadToken
    message: Done | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishDownload:
    message: DownloadChanged


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberPending:
    """Write this down before any later effect."""

    pending: tuple[Wanted, ...]


DownloadEffect = StartDownload | StopDownload | InstallModel | DownloadReply | PublishDownload | RememberPending
