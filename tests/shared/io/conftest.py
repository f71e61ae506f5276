"""Leases are tried out where they matter: under an inference port with a bare engine."""

from __future__ import annotations

from tests.proxyd.conftest import plane, upstream

__all__ = ["plane", "upstream"]
