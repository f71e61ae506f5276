"""Which NPU this machine has, by the kernel driver that runs it. Looked at once; nothing is opened.

Source: the Linux kernel's compute accelerators (``/sys/class/accel``; drivers ``amdxdna`` and ``ivpu``).
"""

from __future__ import annotations

from pathlib import Path

SYSFS = Path("/sys/class/accel")
DRIVERS = {"amdxdna": "AMD XDNA NPU", "intel_vpu": "Intel NPU", "rocket": "Rockchip NPU", "ethosu": "Arm Ethos-U NPU"}
"""The subsystem also has accelerators of data centers; those are no NPUs in the sense of a recipe."""
MODEL_FILES = ("vbnv", "device_type")
"""Where a driver says the model, relative to its device."""


def find_npus(sysfs: Path = SYSFS) -> tuple[str, ...]:
    """Names for people, one for each NPU; empty where the kernel knows none, and on other systems than Linux."""
    found = []
    for device in sorted(sysfs.glob("accel*/device")):
        try:
            driver = (device / "driver").resolve(strict=True).name
        except OSError:
            continue
        if driver in DRIVERS:
            model = _model(device)
            found.append(f"{DRIVERS[driver]} ({model})" if model else DRIVERS[driver])
    return tuple(found)


def _model(device: Path) -> str:
    for name in MODEL_FILES:
        try:
            text = (device / name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        if text.isprintable():
            return text[:64]
    return ""
