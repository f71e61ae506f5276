"""The guide model on llama.cpp's own server (the xllamacpp package), in a process of its own.

Run as a script it serves until its standard input closes: `python docs/guide/engine.py MODEL.gguf` prints the
address that it listens on. `running(model)` does that for the length of a `with` block.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def chat(endpoint: str, messages: list[dict[str, Any]], *, model: str = "meshd-guide", **fields: Any) -> str:
    """One chat completion, without a sampling parameter: the defaults come from the GGUF."""
    body = json.dumps({"model": model, "messages": messages, **fields}).encode()
    return str(post(f"{endpoint}/v1/chat/completions", body)["choices"][0]["message"]["content"])


def ask(endpoint: str, question: str, *, model: str = "meshd-guide") -> str:
    return chat(endpoint, [{"role": "user", "content": question}], model=model)


def post(url: str, body: bytes) -> dict[str, Any]:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        reply: dict[str, Any] = json.load(response)
    return reply


@contextmanager
def running(model: Path) -> Iterator[str]:
    """Yields the endpoint, http://127.0.0.1:PORT. Raises: RuntimeError when the server does not come up."""
    command = [sys.executable, str(Path(__file__).resolve()), str(model)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            endpoint = next((line for line in process.stdout if line.startswith("http://")), "").strip()
            if not endpoint:
                raise RuntimeError(f"the server did not start with {model.name}")
            yield endpoint
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.port = 0
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.cache_ram_mib = 0
    params.warmup = False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
