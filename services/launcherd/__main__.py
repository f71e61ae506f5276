"""``python -m services.launcherd``"""

from __future__ import annotations

from services.launcherd.daemon import NAME, main
from shared.io.lifecycle import run_daemon

if __name__ == "__main__":
    run_daemon(NAME, main)
