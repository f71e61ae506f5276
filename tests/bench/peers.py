"""The proxies people would otherwise put in front of an engine, installed into a cache and run with one upstream.

Each gets a fair configuration for this job: one upstream kept alive, no access log, and otherwise its defaults. The
retries these include are needed: llama-server closes its connection after each stream, which a request can meet.

- **nginx** (Debian's): `worker_processes 1`, because on a machine this small a second worker competes with the
  client and the upstream for the same cores; `proxy_buffering off`, or streams would arrive in one piece;
  `proxy_next_upstream non_idempotent`, which only means a new connection where a kept one broke.
- **sglang-router**: its launcher with one worker URL, round robin, log level warn.
- **litellm** 1.90.1: one worker (its default), one `openai/` model.

What can't be installed is left out, with the reason in a word or two. Installing needs the package index (and apt for
nginx) once; later runs find the cache. `MESHD_BENCH_CACHE` moves it from `~/.cache/meshd/bench`.
"""

from __future__ import annotations

import getpass
import grp
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.bench.children import BenchError, Child, free_port, plain_environment, wait_for_answer

LITELLM_VERSION = "1.90.1"
INSTALL_LIMIT_SECONDS = 900
START_LIMIT_SECONDS = 60
NAMES = ("nginx", "sglang-router", "litellm")


class Unavailable(Exception):
    """A peer can't be had on this machine; the text is the reason in a word or two."""


@dataclass(frozen=True)
class Peer:
    """A started peer: requests go to `port` on loopback once GET `ready_path` answers 200."""

    name: str
    port: int
    version: str
    child: Child
    ready_path: str


def cache() -> Path:
    folder = Path(os.environ.get("MESHD_BENCH_CACHE") or Path.home() / ".cache" / "meshd" / "bench")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True)
class Upstream:
    """The engine behind a peer; `key` is what it wants as a bearer token, or empty."""

    port: int
    model: str
    key: str = ""


def start(name: str, upstream: Upstream, work: Path) -> Peer:
    """Installs the peer if need be and starts it in front of the upstream; `await_ready` comes next.

    `work` is a private folder for its files. Raises: Unavailable.
    """
    starters: dict[str, Callable[[Upstream, Path], Peer]] = {
        "nginx": _start_nginx,
        "sglang-router": _start_sglang_router,
        "litellm": _start_litellm,
    }
    work.mkdir(parents=True, exist_ok=True)
    return starters[name](upstream, work)


def await_ready(peer: Peer) -> None:
    """Raises: Unavailable, with the peer stopped, when it doesn't come up."""
    try:
        wait_for_answer(peer.child, peer.port, peer.ready_path, limit_seconds=START_LIMIT_SECONDS)
    except BenchError as error:
        peer.child.stop()
        raise Unavailable(str(error).splitlines()[0]) from error


def _run(command: list[str], *, cwd: Path | None = None) -> str:
    """Runs an installing command. Raises: Unavailable with the last line it said."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_LIMIT_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{Path(command[0]).name}: no end in {INSTALL_LIMIT_SECONDS} s") from error
    except OSError as error:
        raise Unavailable(str(error)) from error
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise Unavailable(f"{Path(command[0]).name}: {said[-1].strip() if said else done.returncode}")
    return done.stdout + done.stderr


# -- nginx


def _nginx_binary() -> Path:
    found = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found:
        return Path(found)
    root = cache() / "nginx"
    binary = root / "usr" / "sbin" / "nginx"
    if binary.exists():
        return binary
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Unavailable("not installed, and no apt")
    download = cache() / "nginx-download"
    shutil.rmtree(download, ignore_errors=True)
    download.mkdir()
    _run(["apt-get", "download", "nginx"], cwd=download)
    packages = sorted(download.glob("nginx_*.deb"))
    if not packages:
        raise Unavailable("apt-get download brought nothing")
    _run(["dpkg", "-x", str(packages[0]), str(root)])
    shutil.rmtree(download)
    return binary


def nginx_configuration(*, port: int, upstream_port: int, work: Path, user: str) -> str:
    """One worker, one kept-alive upstream, no buffering of answers, no access log."""
    temporary = "\n".join(
        f"  {kind}_temp_path {work}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""{user}
daemon off;
worker_processes 1;
pid {work}/nginx.pid;
error_log stderr error;
events {{ worker_connections 1024; }}
http {{
{temporary}
  access_log off;
  tcp_nodelay on;
  keepalive_requests 100000000;
  client_max_body_size 64m;
  client_body_buffer_size 2m;
  upstream engine {{
    server 127.0.0.1:{upstream_port};
    keepalive 128;
    keepalive_requests 100000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_next_upstream error non_idempotent;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


def _start_nginx(upstream: Upstream, work: Path) -> Peer:
    binary = _nginx_binary()
    version = _run([str(binary), "-v"]).strip().rpartition("/")[2]
    port = free_port()
    user = f"user {getpass.getuser()} {grp.getgrgid(os.getgid()).gr_name};" if os.geteuid() == 0 else ""
    configuration = work / "nginx.conf"
    configuration.write_text(nginx_configuration(port=port, upstream_port=upstream.port, work=work, user=user))
    command = [str(binary), "-p", str(work), "-e", "stderr", "-c", str(configuration)]
    child = Child("nginx", command, log=work / "nginx.log")
    return Peer("nginx", port, version, child, "/health")


# -- the two from the package index


def _virtual_environment(name: str, requirement: str) -> tuple[Path, str]:
    """The Python of a virtual environment in the cache that has the requirement, and the version it has."""
    folder = cache() / name
    python = folder / "bin" / "python"
    complete = folder / ".complete"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement])
        complete.touch()
    distribution = requirement.partition("=")[0].partition("[")[0]
    asked = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    return python, _run([str(python), "-c", asked]).strip()


def _start_sglang_router(upstream: Upstream, work: Path) -> Peer:
    python, version = _virtual_environment("sglang-router", "sglang-router")
    port = free_port()
    command = [
        str(python), "-m", "sglang_router.launch_router",
        "--host", "127.0.0.1", "--port", str(port),
        "--worker-urls", f"http://127.0.0.1:{upstream.port}",
        "--policy", "round_robin",
        "--log-level", "warn",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
        "--worker-startup-check-interval", "1",
        "--disable-circuit-breaker",
    ]  # fmt: skip
    child = Child("sglang-router", command, log=work / "sglang-router.log", cwd=work)
    return Peer("sglang-router", port, version, child, "/readiness")


def _start_litellm(upstream: Upstream, work: Path) -> Peer:
    python, version = _virtual_environment(f"litellm-{LITELLM_VERSION}", f"litellm[proxy]=={LITELLM_VERSION}")
    port = free_port()
    configuration = work / "litellm.yaml"
    configuration.write_text(
        "model_list:\n"
        f"  - model_name: {upstream.model}\n"
        "    litellm_params:\n"
        f"      model: openai/{upstream.model}\n"
        f"      api_base: http://127.0.0.1:{upstream.port}/v1\n"
        f"      api_key: {upstream.key or 'none'}\n"
        "litellm_settings:\n"
        "  telemetry: false\n"
    )
    command = [
        str(python.with_name("litellm")),
        "--config", str(configuration),
        "--host", "127.0.0.1", "--port", str(port),
        "--num_workers", "1",
        "--telemetry", "False",
    ]  # fmt: skip
    env = plain_environment({"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"})
    child = Child("litellm", command, log=work / "litellm.log", env=env, cwd=work)
    return Peer("litellm", port, version, child, "/health/liveliness")
