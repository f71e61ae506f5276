"""A hub on loopback: the HTTP that `huggingface_hub` speaks, with a switch for everything that can go wrong.

Two servers, as in the world: the hub (model info, `resolve` with its redirect and headers) and a content server behind
another origin that sends the large files' bytes and must never see the hub's token. Both count.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, quote, unquote, urlsplit

CHUNK = 16 * 1024
COMMIT = "c0ffee" + "0" * 34

FaultKind = Literal[
    "range_ignored", "truncated", "cut", "garbled", "stall", "status", "wrong_range", "compressed", "too_long"
]


@dataclass
class Fault:
    """What goes wrong with the bytes of files whose name contains `file`, so many times."""

    kind: FaultKind
    at: int = 0
    """After how many bytes of the answer's body."""
    times: int = 1
    file: str = ""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    where: Literal["content", "info", "resolve"] = "content"


@dataclass
class Asked:
    server: str
    method: str
    path: str
    headers: dict[str, str]


class FakeHub:
    """Holds repositories in memory. `sent` counts body bytes by file name; `asked` is every request."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, str] = {}
        """Repository -> the token that opens it."""
        self.gated: set[str] = set()
        self.in_git: set[str] = set()
        """Names of files that are not in LFS."""
        self.sizes: dict[str, int] = {}
        """What the hub says of a file's size where that is a lie."""
        self.plain: dict[str, bytes] = {}
        """Files of the content server, by name, as any web server has them."""
        self.no_head = False
        self.no_range = False
        self.faults: list[Fault] = []
        self.sent: dict[str, int] = {}
        self.asked: list[Asked] = []
        self.released = threading.Event()
        self._lock = threading.Lock()
        self._servers = [_server(self, _HubHandler), _server(self, _ContentHandler)]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def content(self) -> str:
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    def add(self, repo: str, **files: bytes) -> None:
        self.repos.setdefault(repo, {}).update(files)

    def fault(self, kind: FaultKind, **fields: Any) -> Fault:
        fault = Fault(kind, **fields)
        self.faults.append(fault)
        return fault

    def take_fault(self, where: str, file: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.where == where and fault.times > 0 and fault.file in file:
                    fault.times -= 1
                    return fault
        return None

    def count(self, file: str, number: int) -> None:
        with self._lock:
            self.sent[file] = self.sent.get(file, 0) + number

    def ranges(self, file: str) -> list[str]:
        """The Range headers of all requests for a file's bytes, in order."""
        return [
            asked.headers.get("range", "")
            for asked in self.asked
            if asked.server == "content" and asked.method == "GET" and unquote(urlsplit(asked.path).path).endswith(file)
        ]

    def start(self) -> None:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.released.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    hub.start()
    try:
        yield hub
    finally:
        hub.close()


def _server(hub: FakeHub, handler: type[_Handler]) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.hub = hub  # type: ignore[attr-defined]
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    name = ""

    @property
    def hub(self) -> FakeHub:
        found: FakeHub = self.server.hub  # type: ignore[attr-defined]
        return found

    def log_message(self, format: str, *args: object) -> None:
        pass

    def note(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.asked.append(Asked(self.name, self.command, self.path, headers))

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def failed(self, where: str, file: str) -> bool:
        fault = self.hub.take_fault(where, file)
        if fault is None:
            return False
        if fault.kind == "stall":
            self.hub.released.wait(60)
            self.close_connection = True
            return True
        self.answer(fault.status, b'{"error": "as ordered"}', **fault.headers)
        return True


class _HubHandler(_Handler):
    name = "hub"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.note()
        url = urlsplit(self.path)
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", url.path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path)
        found = info or file
        repo = found[1] if found else ""
        if repo not in self.hub.repos or self._refused(repo):
            code = "GatedRepo" if repo in self.hub.gated else "RepoNotFound"
            self.answer(403 if code == "GatedRepo" else 401, X_Error_Code=code, X_Error_Message="no access")
        elif found and found[2] not in (None, "main", COMMIT):
            self.answer(404, X_Error_Code="RevisionNotFound")
        elif info:
            if not self.failed("info", repo):
                self._info(repo, blobs="blobs" in parse_qs(url.query))
        elif file:
            self._resolve(repo, unquote(file[3]))

    def _refused(self, repo: str) -> bool:
        token = self.hub.private.get(repo)
        return repo in self.hub.gated or (token is not None and self.headers["Authorization"] != f"Bearer {token}")

    def _info(self, repo: str, *, blobs: bool) -> None:
        siblings = []
        for name, content in self.hub.repos[repo].items():
            item: dict[str, Any] = {"rfilename": name}
            if blobs:
                size = self.hub.sizes.get(name, len(content))
                item |= {"size": size, "blobId": git_sha1(content)}
                if name not in self.hub.in_git:
                    item["lfs"] = {"sha256": sha256(content), "size": size, "pointerSize": 134}
            siblings.append(item)
        document = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
        self.answer(200, json.dumps(document).encode(), Content_Type="application/json")

    def _resolve(self, repo: str, name: str) -> None:
        content = self.hub.repos[repo].get(name)
        if content is None:
            self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        elif self.failed("resolve", name):
            return
        elif name in self.hub.in_git:
            self.hub.count(name, len(content) if self.command == "GET" else 0)
            self.answer(200, content, ETag=f'"{git_sha1(content)}"', X_Repo_Commit=COMMIT)
        else:
            self.answer(
                302,
                Location=f"{self.hub.content}/blobs/{repo}/{quote(name)}?signature=s",
                ETag=f'"{sha256(content)}"',
                X_Linked_ETag=f'"{sha256(content)}"',
                X_Linked_Size=str(len(content)),
                X_Repo_Commit=COMMIT,
            )


class _ContentHandler(_Handler):
    name = "content"

    def do_HEAD(self) -> None:
        self.note()
        content = self._content()[1]
        if self.hub.no_head:
            self.answer(405)
        elif content is None:
            self.answer(404)
        else:
            self.answer(200, Content_Length=str(len(content)), ETag=f'"{sha256(content)[:16]}"')

    def do_GET(self) -> None:
        self.note()
        name, content = self._content()
        if content is None:
            self.answer(404)
            return
        fault = self.hub.take_fault("content", name)
        if fault is not None and fault.kind == "status":
            self.answer(fault.status, b"as ordered", **fault.headers)
            return
        self._send(name, content, fault)

    def _content(self) -> tuple[str, bytes | None]:
        path = unquote(urlsplit(self.path).path)
        blob = re.fullmatch(r"/blobs/([^/]+/[^/]+)/(.+)", path)
        if blob:
            return blob[2], self.hub.repos.get(blob[1], {}).get(blob[2])
        name = path.removeprefix("/files/")
        return name, self.hub.plain.get(name)

    def _send(self, name: str, content: bytes, fault: Fault | None) -> None:
        kind = fault.kind if fault else ""
        etag = f'"{sha256(content)[:16]}"'
        start, end = self._range(len(content))
        changed = self.headers.get("If-Range", etag) != etag
        if kind == "range_ignored" or self.hub.no_range or changed:
            start, end = 0, None
        elif start >= len(content) > 0 and end is not None:
            self.answer(416, Content_Range=f"bytes */{len(content)}")
            return
        body = content[start : end if end is not None else len(content)]
        if kind == "garbled":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if kind == "too_long":
            body += b"more"
        announced = len(body)
        if fault and kind == "truncated":
            body = body[: fault.at]
            announced = len(body)
        self.send_response(200 if end is None else 206)
        if end is not None:
            first = start + 1 if kind == "wrong_range" else start
            self.send_header("Content-Range", f"bytes {first}-{start + len(body) - 1}/{len(content)}")
        if kind == "compressed":
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(announced))
        self.send_header("ETag", etag)
        self.end_headers()
        stop = fault.at if fault and kind in ("cut", "stall") else len(body)
        try:
            for at in range(0, stop, CHUNK):
                piece = body[at : min(at + CHUNK, stop)]
                self.wfile.write(piece)
                self.hub.count(name, len(piece))
            self.wfile.flush()
            if kind == "stall":
                self.hub.released.wait(60)
        except OSError:
            pass  # The client went away.
        if kind in ("cut", "stall"):
            self.close_connection = True

    def _range(self, size: int) -> tuple[int, int | None]:
        """First byte and end; no end without a Range header."""
        matched = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if matched is None:
            return 0, None
        return int(matched[1]), min(size, int(matched[2]) + 1) if matched[2] else size


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
