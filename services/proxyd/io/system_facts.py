"""What this machine is, for ``GET system-info``: read once, from the operating system alone."""

from __future__ import annotations

import platform
import re

import psutil

from services.proxyd.lemonade import SystemFacts

CPU_FILE = "/proc/cpuinfo"
_CPU_NAME = re.compile(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", re.MULTILINE)


def read_system_facts() -> SystemFacts:
    """Blocks for milliseconds; what cannot be read stays unknown."""
    return SystemFacts(
        os_version=platform.platform(),
        processor=_processor_name(),
        architecture=platform.machine(),
        cores=psutil.cpu_count(logical=False) or 0,
        threads=psutil.cpu_count() or 0,
        memory_bytes=psutil.virtual_memory().total,
    )


def _processor_name() -> str:
    try:
        with open(CPU_FILE, encoding="utf-8", errors="replace") as file:
            found = _CPU_NAME.search(file.read(16 * 1024))
    except OSError:
        found = None
    return found[1].strip() if found is not None else platform.processor()
