"""Messages every daemon understands."""

from __future__ import annotations

from shared.ids import BootId
from shared.messages.registry import message, part


@message
class Done:
    """A request was carried out; ``detail`` is a sentence for people, possibly empty."""

    detail: str = ""
    subject: str = ""
    """The name of what it was about, where the request could not know it: a pulled model's."""


@message
class Refused:
    """A request was not carried out. ``code`` is stable, ``detail`` says what, why and what to do next."""

    code: str
    detail: str
    retry_after_seconds: float | None = None


@message
class Heartbeat:
    """Published once a second so that a subscriber notices that it missed the last publication."""


@message
class GetSnapshot:
    """Request: the daemon's whole published state."""


@message
class Snapshot:
    """Reply: ``items`` are encoded messages; the state is as of publication ``seq`` of ``boot_id``."""

    boot_id: BootId
    seq: int
    items: tuple[bytes, ...]


@message
class GetDaemonInfo:
    """Request: who is answering here."""


@message
class DaemonInfo:
    name: str
    pid: int
    version: str
    boot_id: BootId
    uptime_seconds: float
    state: str
    """One line for people, for example ``2 models loaded, 1 waiting``."""
    counters: dict[str, int]
    """Refusals, drops and resyncs by name, since start."""


@message
class GetStory:
    """Request: the newest ``limit`` entries of the daemon's story, oldest first."""

    limit: int = 100


@part
class StoryEntry:
    age_seconds: float
    stimulus: str
    effects: tuple[str, ...]


@message
class Story:
    entries: tuple[StoryEntry, ...]


@message
class ExplainSubject:
    """Request: what this daemon knows about a model, node or request, in words. Reply: ``Explanation``."""

    subject: str


@message
class Explanation:
    """``sentences`` is empty when the daemon knows nothing about the subject."""

    sentences: tuple[str, ...]


@message
class ReloadConfig:
    """Request: read ``mesh.toml`` again. Reply ``ConfigReloaded``, or ``Refused`` and nothing changed."""


@message
class ConfigReloaded:
    changed: tuple[str, ...]
    """Dotted keys that took effect."""
    needs_restart: tuple[str, ...]
    """Dotted keys that changed but only take effect when this daemon is restarted."""
