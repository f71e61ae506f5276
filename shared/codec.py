"""Messages to bytes and back: msgpack for bytes, pydantic for types, one table of tags.

A message is the msgpack array ``[tag, {field: value}]``; plain ``msgpack.unpackb`` reads it. Decoding hostile or
malformed bytes raises :class:`SchemaError` and nothing else.
"""

from __future__ import annotations

from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

import shared.messages  # noqa: F401  (fills the registry)
from shared.errors import SchemaError, UnknownTag
from shared.messages.registry import REGISTRY

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Largest encoded message. A catalog of 2,000 models is about 1 MB; a bigger frame is a fault or an attack."""
MAX_NESTING = 32
"""Arrays and maps inside each other; our own messages need 6."""
DETAIL_CHARACTERS = 300
"""What an error says about foreign bytes is bounded: they may name a key of megabytes, and we answer and log it."""

Message = Any
"""Any dataclass of :data:`shared.messages.registry.REGISTRY`; callers match on the class."""


_adapters: dict[type[Any], TypeAdapter[Any]] = {}
"""Built once each, on first use: a daemon pays only for the messages it speaks."""


def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    adapter = _adapters.get(cls)
    if adapter is None:
        adapter = _adapters[cls] = TypeAdapter(cls)
    return adapter


def to_fields(message: Message) -> list[Any]:
    """``[tag, {field: value}]`` of plain msgpack types."""
    cls = type(message)
    tag = cls.__name__
    if REGISTRY.get(tag) is not cls:
        raise TypeError(f"{cls!r} is not a registered message")
    return [tag, _adapter(cls).dump_python(message, mode="python")]


def to_jsonable(message: Message) -> Any:
    """The message's fields as JSON types, for ``--json`` and HTTP. Bytes become URL-safe base64."""
    return _adapter(type(message)).dump_python(message, mode="json")


def from_fields(tag: Any, fields: Any) -> Message:
    """The message of a decoded ``[tag, fields]`` pair.

    Raises: SchemaError (UnknownTag for a tag this version does not know).
    """
    if not isinstance(tag, str) or not isinstance(fields, dict):
        raise SchemaError("a message is [tag, {field: value}]")
    cls = REGISTRY.get(tag)
    if cls is None:
        raise UnknownTag(f"unknown message {tag[:64]!r}")
    try:
        return _adapter(cls).validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SchemaError(_short(f"{tag}: {where}: {first['msg']}")) from None
    except (RecursionError, OverflowError, ValueError, TypeError) as error:
        raise SchemaError(_short(f"{tag}: {error}")) from None


def pack(value: Any) -> bytes:
    """Plain msgpack types to bytes.

    Raises: SchemaError for what msgpack cannot carry (an integer over 64 bits, text that is not Unicode, like the
    name of a file with stray bytes) and for more than ``MAX_MESSAGE_BYTES``.
    """
    try:
        data: bytes = msgpack.packb(value, use_bin_type=True)
    except (OverflowError, ValueError) as error:
        raise SchemaError(_short(f"cannot be sent: {error}")) from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise SchemaError(f"message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return data


def unpack(data: bytes) -> Any:
    """Bytes to plain msgpack types, every size bounded. Raises: SchemaError."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise SchemaError(f"message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=MAX_MESSAGE_BYTES,
            max_bin_len=MAX_MESSAGE_BYTES,
            max_array_len=65_536,
            max_map_len=4_096,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise SchemaError(_short(f"not msgpack: {str(error) or type(error).__name__}")) from None
    _check_nesting(value)
    return value


def _short(text: str) -> str:
    return text if len(text) <= DETAIL_CHARACTERS else text[: DETAIL_CHARACTERS - 1] + "…"


def _check_nesting(value: Any) -> None:
    level = [value]
    for _ in range(MAX_NESTING):
        level = [
            child
            for item in level
            if isinstance(item, list | dict)
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, list | dict)
        ]
        if not level:
            return
    raise SchemaError(f"nested deeper than {MAX_NESTING} levels")


def encode(message: Message) -> bytes:
    """One message to bytes. Raises: SchemaError when too large."""
    return pack(to_fields(message))


def decode(data: bytes) -> Message:
    """One message from bytes. Raises: SchemaError, and nothing else, whatever the bytes."""
    value = unpack(data)
    if not isinstance(value, list) or len(value) != 2:
        raise SchemaError("a message is [tag, {field: value}]")
    return from_fields(value[0], value[1])
