"""Downloads over Lemonade's ``pull``: answers, events, and who may stop what; launcherd is scripted."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from typing import Any

from shared.errors import RequestRefused
from shared.ids import ModelName
from shared.messages.downloads import CancelPull, DownloadChanged, DownloadState, PullModel
from tests.proxyd.plane import Plane
from tests.proxyd.scripted_launcherd import Scripted, ask
from tests.proxyd.wire import in_background
from tests.waiting import wait_until


def events(plane: Plane, body: Any, seen: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """A streamed pull, read to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", plane.port, timeout=10)
    connection.request("POST", "/api/v1/pull", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
    name = ""
    for raw in answer:
        line = raw.decode().rstrip("\n")
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            seen.append((name, json.loads(line[6:])))
    connection.close()
    return seen


def download(state: DownloadState, done: int = 0, **fields: Any) -> DownloadChanged:
    return DownloadChanged(
        model=ModelName("known"), checkpoint="org/known:Q4", state=state, reason="", file="known.gguf", file_index=1,
        file_count=1, bytes_done=done, bytes_total=1000, **fields,
    )  # fmt: skip


def test_a_pull_answers_when_the_files_are_there(plane: Plane, launcherd: Scripted) -> None:
    """docs/spec/lemonade.md 19."""
    body = {"model_name": "here", "recipe": "llamacpp", "checkpoint": "o/r:Q4", "embedding": True}
    status, answer = ask(plane, "POST", "/v1/pull", body)
    assert (status, answer["status"], answer["message"]) == (200, "success", "Installed model: here")
    assert launcherd.asked == [
        PullModel(model="here", checkpoint="o/r:Q4", recipe="llamacpp", labels=("embeddings",))
    ]


def test_a_streamed_pull_tells_its_progress(plane: Plane, launcherd: Scripted) -> None:
    """docs/spec/lemonade.md 19."""
    launcherd.say(download("failed", 7, code="offline"))  # An earlier one's end is no news.
    launcherd.hold = asyncio.Event()
    seen: list[tuple[str, Any]] = []
    ended = in_background(lambda: events(plane, {"model_name": "known", "stream": True}, seen))
    wait_until(lambda: launcherd.of(PullModel), 5, "launcherd is asked")
    for done in (100, 600):
        launcherd.say(download("downloading", done))
        wait_until(lambda done=done: seen and seen[-1][1].get("bytes_downloaded") == done, 5, "the event")
    launcherd.say(download("done", 1000))
    launcherd.release()
    wait_until(lambda: ended, 5, "the stream ends")
    assert [name for name, _ in seen] == ["progress", "progress", "complete"]
    assert seen[0][1] | {"reason": ""} == {
        "file": "known.gguf", "file_index": 1, "total_files": 1, "bytes_downloaded": 100, "bytes_total": 1000,
        "percent": 10, "bytes_per_second": 0, "status": "downloading", "reason": "", "model_name": "known",
    }  # fmt: skip
    assert (seen[-1][1]["percent"], seen[-1][1]["total_files"]) == (100, 1)
    assert launcherd.of(CancelPull) == []


def test_a_streamed_pull_that_fails_ends_with_an_error(plane: Plane, launcherd: Scripted) -> None:
    """docs/spec/lemonade.md 5: only the event `error` of a stream has its message in `error` itself."""
    launcherd.refuse = RequestRefused("disk_full", "needs 4 GB; 1 GB is free in ~/.models")
    seen = events(plane, {"model_name": "known", "stream": True}, [])
    assert seen == [("error", {"error": "needs 4 GB; 1 GB is free in ~/.models", "code": "disk_full"})]


def leave_stream(plane: Plane, launcherd: Scripted, pulls: int) -> socket.socket:
    body = b'{"model_name":"known","stream":true}'
    connection = socket.create_connection(("127.0.0.1", plane.port), timeout=10)
    connection.sendall(b"POST /v1/pull HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert b"200 OK" in connection.recv(65536)
    wait_until(lambda: len(launcherd.of(PullModel)) == pulls, 5, "launcherd is asked")
    return connection


def test_who_began_a_download_and_goes_cancels_it(plane: Plane, launcherd: Scripted) -> None:
    """docs/spec/lemonade.md 21: which is how Lemonade's own clients cancel one."""
    launcherd.hold = asyncio.Event()
    leave_stream(plane, launcherd, 1).close()
    wait_until(lambda: launcherd.of(CancelPull) == [CancelPull(model="known")], 5, "it is cancelled")


def test_a_download_that_others_follow_or_began_goes_on(plane: Plane, launcherd: Scripted) -> None:
    """docs/spec/lemonade.md 21: the download that it began is cancelled, unless another stream follows it."""
    launcherd.hold = asyncio.Event()
    first = leave_stream(plane, launcherd, 1)
    second = leave_stream(plane, launcherd, 2)
    first.close()
    wait_until(lambda: plane.call(lambda: len(plane._client._pending)) == 1, 5, "one is gone")
    assert launcherd.of(CancelPull) == []
    second.close()
    wait_until(lambda: plane.call(lambda: len(plane._client._pending)) == 0, 5, "both are gone")
    launcherd.say(download("downloading", 1))
    leave_stream(plane, launcherd, 3).close()
    wait_until(lambda: plane.call(lambda: len(plane._client._pending)) == 0, 5, "the third is gone")
    assert launcherd.of(CancelPull) == []
