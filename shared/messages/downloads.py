"""The model registry and downloads, kept by launcherd."""

from __future__ import annotations

from typing import Literal

from shared.ids import ModelName
from shared.messages.models import ModelType
from shared.messages.registry import message, part

DownloadState = Literal["queued", "resolving", "downloading", "verifying", "done", "failed", "cancelled"]


@part
class RegisteredModel:
    """A model that this node can get or has: of the built-in catalog, or registered by the user."""

    name: ModelName
    checkpoint: str
    """``org/repo:quant``, ``org/repo:file.gguf``, a URL, or a path."""
    recipe: str = "llamacpp"
    type: ModelType = "llm"
    labels: tuple[str, ...] = ()
    size_bytes: int = 0
    """0: not known before it was looked up."""
    downloaded: bool = False
    user: bool = False
    """Registered by the user; ``DeleteModel`` forgets it too."""


@message
class RegistryChanged:
    """launcherd: the whole registry."""

    models: tuple[RegisteredModel, ...]


@message
class DownloadChanged:
    """launcherd: one download's state. ``done``, ``failed`` and ``cancelled`` are last words."""

    model: ModelName
    checkpoint: str
    state: DownloadState
    reason: str
    """In words: what it waits for, what went wrong and what to do."""
    code: str = ""
    """Of a failed one: the error's code."""
    file: str = ""
    """The one being fetched."""
    file_index: int = 0
    """Counted from 1."""
    file_count: int = 0
    bytes_done: int = 0
    """Over all files, with what was there before."""
    bytes_total: int = 0
    bytes_per_second: float = 0.0


@message
class PullModel:
    """Request: get a model onto this node's disk. Reply ``Done`` (it is there), or ``Refused``.

    ``model`` is a name of the registry, ``org/repo:quant``, ``hf.co/org/repo``, or a URL of a ``.gguf`` file. With
    ``checkpoint`` it is a new name for that, registered with ``recipe`` and ``labels``. The same model twice is one
    download. With ``wait`` false the reply comes once it is queued. ``DownloadChanged`` tells how far it is.
    """

    model: str
    checkpoint: str = ""
    recipe: str = ""
    labels: tuple[str, ...] = ()
    mmproj: str = ""
    """A projector file of the same repository, for models that see."""
    wait: bool = True


@message
class CancelPull:
    """Request: stop a download; what is there stays for the next one. Reply ``Done`` or ``Refused``."""

    model: str


@message
class DeleteModel:
    """Request: unload a model and delete its files, if meshd downloaded them. Reply ``Done`` or ``Refused``."""

    model: ModelName
