"""``python -m services.electiond``"""

from __future__ import annotations

from services.electiond.daemon import main
from shared.io.lifecycle import run_daemon

if __name__ == "__main__":
    run_daemon("electiond", main)
