"""NPUs as the kernel shows them: a made-up /sys/class/accel, links and all."""

from __future__ import annotations

from pathlib import Path

from services.launcherd.io.npu import find_npus


def accelerator(sysfs: Path, number: int, driver: str, **files: str) -> None:
    """As the kernel does it: the class entry, its device, and the device's driver are links."""
    device = sysfs.parent / "devices" / f"pci-{number}"
    device.mkdir(parents=True)
    drivers = sysfs.parent / "drivers" / driver
    drivers.mkdir(parents=True, exist_ok=True)
    (device / "driver").symlink_to(drivers)
    for name, text in files.items():
        (device / name).write_text(text)
    entry = sysfs / f"accel{number}"
    entry.mkdir(parents=True)
    (entry / "device").symlink_to(device)


def test_npus_are_named_by_their_driver_and_what_it_says(tmp_path: Path) -> None:
    sysfs = tmp_path / "accel"
    accelerator(sysfs, 0, "amdxdna", vbnv="NPU Strix Halo\n")
    accelerator(sysfs, 1, "intel_vpu")
    assert find_npus(sysfs) == ("AMD XDNA NPU (NPU Strix Halo)", "Intel NPU")


def test_other_accelerators_are_no_npus(tmp_path: Path) -> None:
    sysfs = tmp_path / "accel"
    accelerator(sysfs, 0, "habanalabs")
    (sysfs / "accel1").mkdir()
    assert find_npus(sysfs) == ()


def test_a_kernel_without_them(tmp_path: Path) -> None:
    assert find_npus(tmp_path / "nothing") == ()
    sysfs = tmp_path / "accel"
    accelerator(sysfs, 0, "amdxdna", vbnv="\x1b[31mred")
    assert find_npus(sysfs) == ("AMD XDNA NPU",), "what a driver says cannot write to a terminal"
