"""``python -m services.gossipd``"""

from __future__ import annotations

from services.gossipd.daemon import main
from shared.io.lifecycle import run_daemon

if __name__ == "__main__":
    run_daemon("gossipd", main)
