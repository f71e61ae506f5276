"""``python -m services.tunneld``"""

from __future__ import annotations

from services.tunneld.daemon import main
from shared.io.lifecycle import run_daemon

if __name__ == "__main__":
    run_daemon("tunneld", main)
