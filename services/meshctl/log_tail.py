"""Reading the end of a log file, whole or for its newest error."""

from __future__ import annotations

import os
import re
from pathlib import Path

TAIL_BYTES = 16_384
_ERROR = re.compile(r' error event=(\S+)(?:.* (?:reason|line)="([^"]*)"|.* (?:reason|line)=(\S+))?')


def last_error(path: Path) -> str:
    """The reason in the newest error line, else the last line; empty without a log.

    Only what the newest start of the process wrote counts, as far as that can be seen.
    """
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    for line in reversed(lines):
        if line.endswith(" ready") and " " not in line.removesuffix(" ready"):
            break
        if found := _ERROR.search(line):
            return found.group(2) or found.group(3) or found.group(1)
    return lines[-1] if lines else ""
