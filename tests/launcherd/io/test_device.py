"""What models may use, by what the engine, the drivers or the RAM say."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from services.launcherd.command_line import Engine
from services.launcherd.io.device import MIB, Gpu, engine_gpus, listed_gpus, measure_device, nvidia_gpus, ram_bytes
from shared.config import NodeSection

LISTING = """ggml_cuda_init: found 2 CUDA devices:
Available devices:
  CUDA0: NVIDIA GeForce RTX 3090 (24124 MiB, 23000 MiB free)
  CUDA1: NVIDIA GeForce RTX 3060 (12036 MiB, 11900 MiB free)
  BLAS: OpenBLAS (0 MiB, 0 MiB free)
  RPC0: 127.0.0.1:50052 (8000 MiB, 8000 MiB free)
"""


def llama_server(folder: Path, listing: str) -> Engine:
    """An executable that lists devices like llama-server."""
    path = folder / "llama-server"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{listing}END\n")
    path.chmod(0o755)
    return Engine(
        kind="llama-server", program=(str(path),), version="test", flags=frozenset({"--port", "--list-devices"})
    )


def test_the_engines_own_list_decides(tmp_path: Path) -> None:
    """A GPU that the engine cannot use is no place for a model."""
    device = measure_device(NodeSection(), llama_server(tmp_path, LISTING))
    assert device.device == "NVIDIA GeForce RTX 3090 + NVIDIA GeForce RTX 3060"
    assert device.total_bytes == (24124 + 12036) * MIB
    assert device.reserve_bytes == 2 * 512 * MIB
    assert device.engine == "test"


def test_an_engine_without_gpus_uses_a_share_of_the_ram(tmp_path: Path) -> None:
    """No GPU: 0.75 × RAM, device cpu."""
    device = measure_device(NodeSection(), llama_server(tmp_path, "Available devices:\n"))
    assert device.device == "cpu"
    assert device.capacity_bytes == int(ram_bytes() * 0.75)
    half = measure_device(NodeSection(cpu_share=0.5), llama_server(tmp_path, ""))
    assert half.capacity_bytes == int(ram_bytes() * 0.5)


def test_max_vram_is_an_upper_limit(tmp_path: Path) -> None:
    engine = llama_server(tmp_path, LISTING)
    assert measure_device(NodeSection(max_vram_bytes=5 << 30), engine).capacity_bytes == 5 << 30
    assert measure_device(NodeSection(max_vram_bytes=500 << 30), engine).capacity_bytes < 36 << 30


def test_two_equal_gpus_are_counted(tmp_path: Path) -> None:
    listing = "  CUDA0: A100 (81920 MiB, 1 MiB free)\n  CUDA1: A100 (81920 MiB, 1 MiB free)\n"
    assert measure_device(NodeSection(), llama_server(tmp_path, listing)).device == "2 x A100"


def test_no_engine_is_said_and_the_ram_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    device = measure_device(NodeSection(), None, "install one")
    assert (device.device, device.engine, device.engine_reason) == ("cpu", "", "install one")


def test_names_with_brackets_and_lines_that_are_no_devices() -> None:
    listing = "  Vulkan0: AMD Radeon (RADV NAVI31) (24560 MiB, 24000 MiB free)\nMetal: nothing\n  x: y\n"
    assert listed_gpus(listing) == [Gpu("AMD Radeon (RADV NAVI31)", 24560 * MIB)]


def test_nvidia_smi_where_the_engine_cannot_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NVIDIA through nvidia-smi when present."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\necho 'strange line'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert nvidia_gpus() == [Gpu("NVIDIA H200", 143771 * MIB)]
    engine = Engine(kind="llama-server", program=("/nonexistent",), version="old", flags=None)
    assert measure_device(NodeSection(), engine).total_bytes == 143771 * MIB


def test_the_embedded_engine_is_asked_too(embedded: Engine) -> None:
    assert engine_gpus(embedded) is not None


def test_ram_is_at_most_the_machines() -> None:
    assert 0 < ram_bytes() <= psutil.virtual_memory().total
