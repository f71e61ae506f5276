"""New ids from the operating system's randomness. For shells; a core gets its ids as arguments."""

from __future__ import annotations

import os

from shared.ids import BootId, RequestId


def new_boot_id() -> BootId:
    """16 hex digits."""
    return BootId(os.urandom(8).hex())


def new_request_id() -> RequestId:
    """24 hex digits."""
    return RequestId(os.urandom(12).hex())
