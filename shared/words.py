"""Sizes in words, for reasons that people read."""

from __future__ import annotations


def size_words(size_bytes: int) -> str:
    """``16.0 GB``, ``581 MB``: decimal units, as model files are advertised."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= factor:
            value = size_bytes / factor
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{size_bytes} B"
