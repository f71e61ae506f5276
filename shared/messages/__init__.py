"""Every message that crosses a local socket or, later, a tunnel. ``docs/messages.md`` lists them."""

from __future__ import annotations

from shared.messages import daemon, downloads, gossip, leases, mesh, models, registry, trust, tunnel

__all__ = ["daemon", "downloads", "gossip", "leases", "mesh", "models", "registry", "trust", "tunnel"]
