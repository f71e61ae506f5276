"""The table of all messages: a tag (the class name) for each frozen dataclass that may cross a socket.

Evolution rules: new fields have defaults, meanings never change, unknown keys are ignored, unknown tags are
counted and dropped. ``tests/shared/test_codec.py`` holds golden bytes against accidental change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

REGISTRY: dict[str, type[Any]] = {}
PYDANTIC_CONFIG = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}
"""Bytes in JSON are base64: signatures are not UTF-8."""

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def message(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen, keyword-only, slotted dataclass and register it under its own name."""
    made = part(cls)
    if cls.__name__ in REGISTRY:
        raise TypeError(f"message tag {cls.__name__} is declared twice")
    REGISTRY[cls.__name__] = made
    return made


@dataclass_transform(kw_only_default=True, frozen_default=True)
def part(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass that travels only inside a message."""
    made = dataclass(frozen=True, kw_only=True, slots=True)(cls)
    made.__pydantic_config__ = PYDANTIC_CONFIG  # type: ignore[attr-defined]
    return made
