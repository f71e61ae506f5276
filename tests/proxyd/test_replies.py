"""Errors in each API's shape, and inside a stream."""

from __future__ import annotations

import json

import pytest

from services.proxyd.replies import (
    Failure,
    error_headers,
    error_object,
    model_entry,
    models_list,
    stream_comment,
    stream_error,
)
from shared.ids import ModelName, PeerId
from shared.messages.models import MeshModel


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (403, "permission_error", "permission_error"),
        (404, "not_found_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (503, "server_error", "overloaded_error"),
    ],
)
def test_each_status_has_its_type(status: int, openai: str, anthropic: str) -> None:
    failure = Failure(status, "some_code", "words", param="model")
    assert error_object(failure, "openai") == {
        "error": {"message": "words", "type": openai, "code": "some_code", "param": "model"}
    }
    assert error_object(failure, "anthropic")["type"] == "error"
    assert error_object(failure, "anthropic")["error"]["type"] == anthropic


def test_retry_after_is_whole_seconds_and_at_least_one() -> None:
    for seconds, value in ((0.1, b"1"), (2.2, b"3"), (30, b"30")):
        assert (b"retry-after", value) in error_headers(Failure(503, "c", "m", retry_after_seconds=seconds))
    assert not any(name == b"retry-after" for name, _ in error_headers(Failure(404, "c", "m")))


@pytest.mark.parametrize("tail", [b"", b"x\n\n", b"x\r\n\r\n", b"data: {", b"data: {}\n"])
def test_an_error_in_a_stream_is_an_event_of_its_own(tail: bytes) -> None:
    event = stream_error(Failure(502, "c", "two\nlines"), "openai", tail)
    *_, last, end = (tail + event).replace(b"\r\n", b"\n").split(b"\n\n")
    assert end == b""
    assert json.loads(last.lstrip(b"\n").removeprefix(b"data: "))["error"]["message"] == "two\nlines"
    assert b"[DONE]" not in event


def test_a_comment_stays_on_one_line() -> None:
    assert stream_comment("a\ndata: evil\r\n") == b": a data: evil\n\n"


def test_models_in_openais_form_with_what_else_people_ask() -> None:
    model = MeshModel(
        name=ModelName("<b>"), type="llm", status="loading", reason="why", file_size_bytes=7,
        nodes_on_disk=(PeerId("p"),),
    )  # fmt: skip
    entry = model_entry(model, lambda peer: f"node {peer}")
    assert (entry["id"], entry["object"], entry["owned_by"]) == ("<b>", "model", "meshd")
    assert (entry["status"], entry["reason"], entry["size_bytes"], entry["nodes"]) == ("loading", "why", 7, ["node p"])
    assert models_list([model], str)["object"] == "list"
