"""Models that other engines than llama.cpp run: known by the registry, found by their checkpoint.

Nothing is read from them: what they are is what their entry says, what they need is what they take on the disk.
Blocking. Source: docs/spec/registry.md 9-12.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from services.launcherd.model_catalog import Entry
from services.launcherd.model_info import ModelFile
from services.launcherd.model_source import PathSource, RegistryName, SourceRefused, parse_source
from shared.recipes import LLAMACPP


def other_models(entries: Iterable[Entry], downloads: Path) -> list[tuple[Entry, ModelFile]]:
    """Those whose checkpoint is there."""
    found = []
    for entry in entries:
        if entry.recipe != LLAMACPP:
            file = _file_of(entry, downloads)
            if file is not None:
                found.append((entry, file))
    return found


def _file_of(entry: Entry, downloads: Path) -> ModelFile | None:
    try:
        source = parse_source(entry.checkpoint)
    except SourceRefused:
        return None
    if isinstance(source, RegistryName):
        # The engine keeps its models itself, and fetches what is missing when it loads it.
        return _model(entry, entry.checkpoint, (), 0)
    if isinstance(source, PathSource):
        path = Path(os.path.expanduser(source.path))
    else:
        path = _only_file(downloads / entry.name)
    try:
        size = path.stat().st_size if path.is_file() else sum(_sizes(path))
    except OSError:
        return None
    return _model(entry, str(path), (str(path),), size) if path.exists() else None


def _model(entry: Entry, path: str, parts: tuple[str, ...], size_bytes: int) -> ModelFile:
    return ModelFile(
        name=entry.name,
        type=entry.type,
        path=path,
        parts=parts,
        architecture="",
        trained_context_tokens=0,
        parameters=0,
        file_size_bytes=size_bytes,
        kv_bytes_per_token=0,
        compute_bytes=0,
        quantization="",
        chat_template=entry.type == "llm",
    )


def _only_file(folder: Path) -> Path:
    """The file that is all there is in a downloaded model's folder, else the folder."""
    try:
        inside = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return folder
    return inside[0] if len(inside) == 1 and inside[0].is_file() else folder


def _sizes(folder: Path) -> Iterable[int]:
    for root, _, files in os.walk(folder):
        for name in files:
            yield os.lstat(os.path.join(root, name)).st_size
