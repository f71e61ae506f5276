"""Which model a person or a client means."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from services.launcherd.model_info import split_part_name
from shared.ids import ModelName
from shared.messages.models import SkippedFile


def find_name(asked: str, known: Collection[ModelName]) -> ModelName | None:
    """The known model that `asked` names: exactly, or as a file name or path, with or without `.gguf`."""
    if asked in known:
        return ModelName(asked)
    base = asked.rstrip("/").rpartition("/")[2]
    stem = base if base.lower().endswith(".gguf") else f"{base}.gguf"
    for candidate in (base, split_part_name(stem).stem):
        if candidate in known:
            return ModelName(candidate)
    return None


def skipped_words(asked: str, skipped: Iterable[SkippedFile]) -> str:
    """Why the file that `asked` names is no model here; empty when no such file was skipped."""
    for file in skipped:
        if asked and (file.path == asked or file.path.rpartition("/")[2] in (asked, f"{asked}.gguf")):
            return f"{file.path} was skipped: {file.reason}"
    return ""


def not_found_words(asked: str, known: Collection[ModelName], skipped: Iterable[SkippedFile] = ()) -> str:
    """Why there is no such model, and what to do."""
    if words := skipped_words(asked, skipped):
        return words
    shown = asked if len(asked) <= 200 else asked[:199] + "…"
    close = difflib.get_close_matches(shown, known, n=1, cutoff=0.5)
    if close:
        return f"no model {shown!r} on this node; did you mean {close[0]!r}?"
    if not known:
        return f"no model {shown!r} on this node: its models folders hold no model; put a .gguf file into ~/.models"
    return f"no model {shown!r} on this node; 'meshctl models' lists what there is"
