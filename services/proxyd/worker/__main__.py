"""``python -m services.proxyd.worker``: started by the stub, which holds proxyd's lock."""

from __future__ import annotations

import os
import socket

from services.proxyd.daemon import run_worker
from shared.config import load_config
from shared.errors import MeshError
from shared.io import log
from shared.io.lifecycle import run_to_end
from shared.paths import NodePaths

STUB_VARIABLE = "MESH_PROXYD_STUB"


def main() -> None:
    try:
        paths = NodePaths.from_environment(os.environ)
        config = load_config(paths.config_file, os.environ)
        stub = socket.socket(fileno=int(os.environ.pop(STUB_VARIABLE, "")))
    except MeshError as error:
        log.error("cannot_start", daemon="proxyd", code=error.code, reason=error.detail)
        raise SystemExit(1) from None
    except (ValueError, OSError):
        log.error("cannot_start", daemon="proxyd", reason="proxyd starts its worker: run services.proxyd instead")
        raise SystemExit(1) from None
    stub.set_inheritable(False)
    run_to_end("proxyd", run_worker(paths, config, stub))


if __name__ == "__main__":
    main()
