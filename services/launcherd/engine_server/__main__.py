"""Runs the embedded engine in this process: `python -m services.launcherd.engine_server -m FILE --port N …`.

Exit status: 0 after SIGTERM or SIGINT once ready, 1 when the model cannot be served, 2 for a command line that cannot
be used (a flag, a value, a file it names), 3 when the wheel is not installed. SIGTERM while loading kills at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from services.launcherd.engine_server.arguments import (
    EnumName,
    ServerArguments,
    Setting,
    UsageError,
    known_flags,
    parse_arguments,
)

LOG_FLUSH_SECONDS = 0.2


def main() -> int:
    try:
        arguments = parse_arguments(sys.argv[1:], os.environ)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.action == "help":
        print("usage: python -m services.launcherd.engine_server -m FILE [flags of llama-server]\n")
        print("\n".join(f"  {names.replace(' ', ', ')}" for names in known_flags()))
        print("\nThe API key is best given as LLAMA_API_KEY, which other users cannot see.")
        return 0
    try:
        import xllamacpp
    except ImportError as error:
        print(f"error: the embedded engine is not installed: {error}", file=sys.stderr)
        return 3
    if arguments.action == "version":
        print(f"version: xllamacpp {xllamacpp.__version__}")
        return 0
    return _serve(xllamacpp, arguments)


def _serve(binding: Any, arguments: ServerArguments) -> int:
    # The key is in our memory now; crash reports and children need not have it.
    os.environ.pop("LLAMA_API_KEY", None)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        params = _params(binding, dict(arguments.settings))
    except (OSError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        server = binding.Server(params)
    except (RuntimeError, OSError) as error:
        # llama.cpp writes its log from a thread of its own and says there why it failed.
        time.sleep(LOG_FLUSH_SECONDS)
        print(f"error: {error}", file=sys.stderr)
        return 1
    return _wait_for_signal(f"engine ready: {server.listening_address}")


def _params(binding: Any, settings: dict[str, Setting]) -> Any:
    """Raises: OSError, UsageError when a named file or setting cannot be used."""
    params = binding.CommonParams()
    threads = max(1, (os.cpu_count() or 2) - 1)
    generation = settings.setdefault("cpuparams.n_threads", threads)
    if isinstance(generation, int) and generation < 1:
        settings["cpuparams.n_threads"] = generation = threads
    settings.setdefault("cpuparams_batch.n_threads", generation)
    template = settings.pop("chat_template_file", None)
    if template is not None:
        settings["chat_template"] = Path(str(template)).read_text(encoding="utf-8")
    key_file = settings.pop("api_key_file", None)
    if key_file is not None:
        lines = Path(str(key_file)).read_text(encoding="utf-8").splitlines()
        known = settings.get("api_keys", ())
        assert isinstance(known, tuple)
        settings["api_keys"] = (*known, *(line for line in lines if line and not line.startswith("#")))
    for name, value in settings.items():
        owner = params
        *path, attribute = name.split(".")
        for step in path:
            owner = getattr(owner, step)
        try:
            setattr(owner, attribute, _resolved(binding, attribute, value))
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"this build of the engine does not take {name}={value!r}: {error}") from error
    return params


def _resolved(binding: Any, attribute: str, value: Setting) -> Any:
    if isinstance(value, EnumName):
        return getattr(getattr(binding, value.enumeration), value.member)
    if attribute == "model_alias":
        return {str(value)}
    return list(value) if isinstance(value, tuple) else value


def _wait_for_signal(announcement: str) -> NoReturn:
    """Says that the engine is ready, and ends the process on SIGTERM or SIGINT, in the middle of a generation too.

    The signal may land in one of the server's threads, where it would not wake a `signal.pause()` of ours; the
    wakeup pipe always does. Destroying the server would wait for running requests, so the kernel frees everything.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    print(announcement, flush=True)
    os.read(reader, 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
