"""Which models belong on this node by word of electiond, and which of those are not loaded again by themselves.

An evicted or unloaded model is *declined*: its assignment does not load it again until it is requested, or until the
assignment is withdrawn and given anew. What a placement may displace, by the origin of its assignment:

=====================  ================================================================
flag                   everything but other flagged models
request                everything but models that became ready less than 60 s ago
allocation, promotion  as request, and no model that is assigned itself
=====================  ================================================================

Source: DESIGN §2 (electiond chooses the node, launcherd the victim).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shared.ids import ModelName
from shared.messages.models import Assignment

SAFE_SECONDS = 60.0
"""A model is safe from mesh placement for so long after it became ready."""
RACE_SECONDS = 10.0
"""An assignment that follows from a load may arrive after that model's eviction: it does not bring it back."""


class Placement:
    """Assignments and declined models."""

    def __init__(self, declined: Mapping[ModelName, str]) -> None:
        self.assignments: dict[ModelName, Assignment] = {}
        self._declined: dict[ModelName, tuple[str, float | None]] = {
            name: (why, None) for name, why in declined.items()
        }
        self._heard = False

    def give(self, assignments: Iterable[Assignment]) -> None:
        """The whole list, from electiond."""
        given = {assignment.model: assignment for assignment in assignments}
        if self._heard:
            for model in self.assignments.keys() - given.keys():
                self._declined.pop(model, None)
        self._heard = True
        self.assignments = given

    def decline(self, model: ModelName, reason: str, now: float) -> None:
        """It was evicted or unloaded."""
        until = None if model in self.assignments else now + RACE_SECONDS
        self._declined[model] = (reason, until)
        for other in [name for name, (_, end) in self._declined.items() if end is not None and end <= now]:
            del self._declined[other]

    def request(self, model: ModelName) -> None:
        """Somebody asks for the model."""
        self._declined.pop(model, None)

    def declined(self, model: ModelName, now: float) -> str:
        """Why an assignment does not load the model; empty when it does."""
        reason, until = self._declined.get(model, ("", None))
        return reason if until is None or until > now else ""

    def memory(self) -> dict[ModelName, str]:
        return {model: reason for model, (reason, until) in self._declined.items() if until is None}

    def protection(self, wish: Assignment, occupant: ModelName, ready_seconds: float | None) -> str:
        """Why `wish` may not displace `occupant`, to be put behind its name; empty when it may.

        `ready_seconds` is how long it has been ready, None if it is not.
        """
        assigned = self.assignments.get(occupant)
        if wish.origin == "flag":
            return "was named by this node's owner too" if assigned is not None and assigned.origin == "flag" else ""
        if ready_seconds is not None and ready_seconds < SAFE_SECONDS:
            return f"became ready less than {SAFE_SECONDS:.0f} s ago"
        if wish.origin != "request" and assigned is not None:
            return "belongs here as well"
        return ""
