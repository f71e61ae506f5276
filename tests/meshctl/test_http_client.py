"""services.meshctl.http_client against a real HTTP server: answers, refusals, answers that end early."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from services.meshctl.http_client import HttpFailed, answers, chat_events
from shared.errors import RequestRefused

PIECE = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
ANSWERS = {
    "good": (200, b": waiting for the model\n\n" + PIECE + PIECE + b"data: [DONE]\n\n"),
    "cut": (200, PIECE),
    "late-error": (200, PIECE + b'data: {"error":{"code":"engine_exited","message":"it crashed"}}\n\n'),
    "refused": (404, b'{"error":{"code":"model_not_found","message":"no such model"}}'),
    "nonsense": (502, b"<html>bad gateway</html>"),
    "late-string": (200, b'data: {"error":"plain words"}\n\n'),
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send(200 if self.path == "/live" else 404, b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.headers.get("Authorization") == "Bearer wrong":
            self._send(401, b'{"error":{"code":"invalid_api_key","message":"wrong key"}}')
            return
        self._send(*next(answer for name, answer in ANSWERS.items() if f'"{name}"' in body))

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def text_of(url: str, model: str, key: str = "") -> str:
    events = chat_events(url, {"model": model, "messages": []}, key)
    return "".join(choice["delta"]["content"] for event in events for choice in event["choices"])


def test_an_answer_is_streamed_and_comments_are_skipped(url: str) -> None:
    assert text_of(url, "good") == "hihi"


def test_an_answer_without_its_end_is_a_failure(url: str) -> None:
    """One popular proxy ends a cut stream as if it were complete; we say so."""
    with pytest.raises(HttpFailed, match="ended early"):
        text_of(url, "cut")


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("late-error", "engine_exited", "it crashed"),
        ("late-string", "http_200", "plain words"),
        ("refused", "model_not_found", "no such model"),
        ("nonsense", "http_502", "HTTP 502: <html>bad gateway"),
    ],
)
def test_refusals_keep_the_nodes_own_words(url: str, model: str, code: str, words: str) -> None:
    with pytest.raises(RequestRefused, match=words) as caught:
        text_of(url, model)
    assert caught.value.code == code


def test_the_key_is_sent(url: str) -> None:
    with pytest.raises(RequestRefused, match="wrong key"):
        text_of(url, "good", key="wrong")


def test_nobody_listening_is_a_failure_with_the_next_step() -> None:
    with pytest.raises(HttpFailed, match="meshctl status"):
        text_of("http://127.0.0.1:9", "good")
    assert not answers("http://127.0.0.1:9/live")


def test_liveness(url: str) -> None:
    assert answers(f"{url}/live")
    assert not answers(f"{url}/other")
