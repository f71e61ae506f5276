"""What this node can compute with: the devices that the engine itself sees, else what the drivers say, else the RAM.

The engine decides: a GPU that its build cannot use is no place for a model. All calls block for up to seconds.
Source: DESIGN §6 (`vram_bytes`: totals less a reserve, never "free right now"; no GPU: a share of the RAM).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.launcherd.command_line import Engine
from services.launcherd.slot_events import DeviceMeasured
from shared.config import NodeSection

ASK_SECONDS = 20.0
MIB = 1024**2

_LISTED = re.compile(r"^\s+(?P<id>[^\s:]+): (?P<name>.+) \((?P<total>\d+) MiB, \d+ MiB free\)\s*$", re.MULTILINE)
_NO_GPU = ("CPU", "BLAS", "RPC")
_EMBEDDED_DEVICES = """
import json, xllamacpp
gpus = (1, 2)  # ggml_backend_dev_type: 0 CPU, 1 GPU, 2 integrated GPU, 3 accelerator
print(json.dumps([[d["description"] or d["name"], d["memory_total"]]
                  for d in xllamacpp.get_device_info() if int(d["type"].value) in gpus]))
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_bytes: int


def measure_device(section: NodeSection, engine: Engine | None, engine_reason: str = "") -> DeviceMeasured:
    """What models may use, by the node's configuration. Without an engine, what the drivers or the RAM would give."""
    gpus = engine_gpus(engine) if engine is not None else None
    if gpus is None:
        gpus = nvidia_gpus()
    if gpus:
        total = sum(gpu.total_bytes for gpu in gpus)
        reserve = min(total, section.reserve_bytes * len(gpus))
        names = [gpu.name for gpu in gpus]
        name = names[0] if len(set(names)) == 1 else " + ".join(dict.fromkeys(names))
        name = f"{len(gpus)} x {name}" if len(gpus) > 1 and len(set(names)) == 1 else name
    else:
        total = ram_bytes()
        reserve = total - int(total * section.cpu_share)
        name = "cpu"
    if section.max_vram_bytes:
        reserve = max(reserve, total - section.max_vram_bytes)
    return DeviceMeasured(
        device=name,
        total_bytes=total,
        reserve_bytes=reserve,
        engine=engine.version if engine is not None else "",
        engine_reason=engine_reason,
    )


def engine_gpus(engine: Engine) -> list[Gpu] | None:
    """The GPUs that the engine can use; None when it can't say."""
    if engine.kind == "embedded":
        listing = _output([sys.executable, "-P", "-c", _EMBEDDED_DEVICES])
        try:
            found = json.loads(listing.strip().splitlines()[-1]) if listing else None
            return None if found is None else [Gpu(str(name), int(total)) for name, total in found]
        except (ValueError, TypeError, IndexError):
            return None
    if engine.flags is None or "--list-devices" not in engine.flags:
        return None
    listing = _output([*engine.program, "--list-devices"])
    return None if listing is None else listed_gpus(listing)


def listed_gpus(listing: str) -> list[Gpu]:
    """The GPUs in the output of `llama-server --list-devices`."""
    return [
        Gpu(match["name"], int(match["total"]) * MIB)
        for match in _LISTED.finditer(listing)
        if not match["id"].startswith(_NO_GPU) and int(match["total"]) > 0
    ]


def nvidia_gpus() -> list[Gpu]:
    """What nvidia-smi lists; empty without it."""
    listing = _output(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"])
    gpus = []
    for line in (listing or "").splitlines():
        name, _, total = line.rpartition(",")
        if total.strip().isdigit():
            gpus.append(Gpu(name.strip(), int(total) * MIB))
    return gpus


def ram_bytes() -> int:
    """The RAM this process may use: the machine's, or its container's limit."""
    total = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) > 0:
            total = min(total, int(text))
    return total


def _output(command: list[str]) -> str | None:
    """What a program says, on either stream; None if it is not there or fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
