"""A launcherd that answers what is asked of it about models as a test says, over the plane's real bus."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from shared.codec import Message
from shared.errors import RequestRefused
from shared.ids import BootId
from shared.messages.daemon import Done, GetSnapshot, Snapshot
from shared.messages.downloads import CancelPull, PullModel
from shared.messages.models import InventoryChanged, LimitsChanged, LoadModel, ModelLoaded
from tests.proxyd.plane import GrantingLauncherd, Plane, local_model


@dataclass
class Scripted:
    """Speaks for launcherd. ``refuse`` is raised; ``hold`` keeps answers back until it is set."""

    plane: Plane
    asked: list[Message] = field(default_factory=list)
    refuse: RequestRefused | None = None
    hold: asyncio.Event | None = None
    subject: str = ""
    gone: list[Message] = field(default_factory=list)
    """Questions whose answer nobody waited for."""

    async def answer(self, request: Message) -> Message:
        if isinstance(request, GetSnapshot):
            return Snapshot(boot_id=BootId("b"), seq=0, items=())
        self.asked.append(request)
        if self.refuse is not None and not isinstance(request, CancelPull):
            raise self.refuse
        if self.hold is not None and isinstance(request, LoadModel | PullModel):
            await self.hold.wait()
        if isinstance(request, LoadModel):
            slot_id = GrantingLauncherd.slot_of(request.model)
            return ModelLoaded(model=request.model, slot_id=slot_id, load_seconds=1.0, already=False)
        return Done(subject=self.subject)

    def of(self, kind: type[Message]) -> list[Any]:
        return [request for request in self.asked if isinstance(request, kind)]

    def say(self, *messages: Message) -> None:
        """launcherd's publications."""
        for message in messages:
            self.plane.call(self.plane._publication, message)

    def release(self) -> None:
        assert self.hold is not None
        self.plane.call(self.hold.set)


def scripted_launcherd(plane: Plane) -> Scripted:
    """With one model on its disk, ``here``, and one loaded model of each type at a time."""
    scripted = Scripted(plane)
    plane.launcherd.other = scripted.answer
    scripted.say(InventoryChanged(models=(local_model("here"),)), LimitsChanged(max_loaded_models=(1, 1, 1, 1, 1)))
    return scripted


def ask(plane: Plane, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    status, _, answer = plane.request(method, path, body, {name.replace("_", "-"): headers[name] for name in headers})
    return status, json.loads(answer)
