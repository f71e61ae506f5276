"""The unmodified ``openai`` and ``anthropic`` clients, the real launcherd and the embedded engine with the guide model.

electiond and gossipd do not run here: a node must answer without them.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from shared.errors import DaemonUnreachable
from tests.daemons import DaemonProcess, start_daemon_process
from tests.engines.tiny_models import LARGE, write_embedding, write_llm, write_reranking
from tests.proxyd.plane import Plane, running_plane
from tests.waiting import wait_until

pytest.importorskip("xllamacpp", reason="the embedded engine is not installed on this platform")

GUIDE = "meshd-guide"
QUESTION = [{"role": "user", "content": "what is meshd?"}]
LOAD_SECONDS = 30.0


@dataclass
class Node:
    plane: Plane
    launcherd: DaemonProcess
    home: Path

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.plane.port}/v1", api_key="none", max_retries=0)

    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=f"http://127.0.0.1:{self.plane.port}", api_key="none", max_retries=0)

    def restart_launcherd(self) -> None:
        """SIGKILL, and a new one: engines and leases outlive it."""
        self.launcherd.kill()
        self.launcherd = start_daemon_process("launcherd", self.home)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    home = Path(tempfile.mkdtemp(prefix="mesh-", dir="/tmp"))
    models = home / "models"
    models.mkdir()
    write_llm(models / "tiny.gguf", size=LARGE)
    write_embedding(models / "embed.gguf")
    write_reranking(models / "rerank.gguf")
    (home / "mesh.toml").write_text(
        f'[models]\nfolders = ["{models}"]\nmax_loaded_models = [2]\n[engine]\nthreads = 1\nparallel = 2\n'
    )
    launcherd = start_daemon_process("launcherd", home)
    with running_plane(home, own_launcherd=False) as plane:
        running = Node(plane, launcherd, home)
        plane.place_error = DaemonUnreachable("there is no electiond in this test")
        try:
            launcherd.wait_ready()
            wait_until(lambda: plane.call(lambda: plane.view.settled), 20, "the models are known")
            yield running
        finally:
            print(running.launcherd.log())
            running.launcherd.end()
    shutil.rmtree(home, ignore_errors=True)


def test_a_model_loads_for_its_first_request(node: Node) -> None:
    """TRAPS 18: what is loaded for a request is there for that request."""
    assert node.plane.view.model(GUIDE).status == "unloaded"  # type: ignore[union-attr]
    answer = node.openai().chat.completions.create(model=GUIDE, messages=QUESTION, temperature=0, timeout=LOAD_SECONDS)  # type: ignore[call-overload]
    assert "meshd" in answer.choices[0].message.content
    assert answer.usage.completion_tokens > 3
    record = node.plane.metrics.records[-1]
    assert (record.prompt_tokens, record.completion_tokens) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
    )
    assert record.tokens_per_second


def test_openai_streams(node: Node) -> None:
    whole = node.openai().chat.completions.create(model=GUIDE, messages=QUESTION, temperature=0)  # type: ignore[call-overload]
    stream = node.openai().chat.completions.create(model=GUIDE, messages=QUESTION, temperature=0, stream=True)  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content


def test_openai_completions_responses_and_models(node: Node) -> None:
    client = node.openai()
    assert client.completions.create(model=GUIDE, prompt="meshd", max_tokens=4).choices[0].text
    response = client.responses.create(model=GUIDE, input="what is meshd?", max_output_tokens=8)
    assert response.output_text
    kinds = [event.type for event in client.responses.create(model=GUIDE, input="what is meshd?", stream=True)]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    listed = {model.id: model for model in client.models.list()}
    assert {GUIDE, "tiny", "embed", "rerank"} <= set(listed)
    assert client.models.retrieve(GUIDE).id == GUIDE
    assert listed[GUIDE].status == "ready"  # type: ignore[attr-defined]


def test_json_mode_and_tools_are_the_engines_affair_and_arrive_there(node: Node) -> None:
    client = node.openai()
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}},
                                               "required": ["a"], "additionalProperties": False}},
    }  # fmt: skip
    answer = client.chat.completions.create(  # type: ignore[call-overload]
        model=GUIDE, messages=QUESTION, response_format=schema, max_tokens=60, timeout=LOAD_SECONDS
    )
    assert isinstance(json.loads(answer.choices[0].message.content)["a"], bool)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    answer = client.chat.completions.create(model=GUIDE, messages=QUESTION, tools=[tool], max_tokens=20)  # type: ignore[call-overload]
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_embeddings_and_reranking(node: Node) -> None:
    answer = node.openai().embeddings.create(model="embed", input=["cat", "dog"], timeout=LOAD_SECONDS)
    assert len(answer.data) == 2
    assert len(answer.data[0].embedding) > 10
    status, _, body = node.plane.request(
        "POST", "/v1/rerank", {"model": "rerank", "query": "cat", "documents": ["cat", "dog"]}, timeout=LOAD_SECONDS
    )
    assert status == 200
    assert len(json.loads(body)["results"]) == 2


def test_anthropic_messages(node: Node) -> None:
    client = node.anthropic()
    fields: dict[str, Any] = {"model": GUIDE, "messages": QUESTION, "max_tokens": 100, "extra_body": {"temperature": 0}}
    message = client.messages.create(**fields)
    assert "meshd" in message.content[0].text  # type: ignore[union-attr]
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
    assert text == message.content[0].text  # type: ignore[union-attr]
    assert client.messages.count_tokens(model=GUIDE, messages=QUESTION).input_tokens > 0  # type: ignore[arg-type]


def test_the_clients_raise_their_own_errors(node: Node) -> None:
    with pytest.raises(openai.NotFoundError, match="nothing-like-it"):
        node.openai().chat.completions.create(model="nothing-like-it", messages=QUESTION)  # type: ignore[call-overload]
    with pytest.raises(openai.BadRequestError, match="type embedding"):
        node.openai().chat.completions.create(model="embed", messages=QUESTION)  # type: ignore[call-overload]
    with pytest.raises(anthropic.NotFoundError, match="nothing-like-it"):
        node.anthropic().messages.create(model="nothing-like-it", messages=QUESTION, max_tokens=1)  # type: ignore[arg-type]


def begin_stream(node: Node, tokens: int) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", node.plane.port, timeout=60)
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": tokens, "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body).encode())
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.read1(1)
    return answer


def test_launcherd_is_killed_while_a_stream_runs_and_nobody_notices(node: Node) -> None:
    """"SIGKILL of any one of them under load may cost only what that process itself was carrying"."""
    stream = begin_stream(node, 700)
    node.restart_launcherd()
    # New requests start on the credits that are held, while launcherd is away and while it comes back.
    for _ in range(10):
        answer = node.openai().chat.completions.create(model="tiny", messages=QUESTION, max_tokens=2)  # type: ignore[call-overload]
        assert answer.choices[0].message.content
    node.launcherd.wait_ready()
    assert stream.read().endswith(b"data: [DONE]\n\n")
    node.openai().chat.completions.create(model="tiny", messages=QUESTION, max_tokens=2)  # type: ignore[call-overload]


def test_an_engine_that_is_killed_mid_stream_ends_the_stream_with_an_error_and_comes_back(node: Node) -> None:
    stream = begin_stream(node, 4000)
    [slot] = [slot for slot in node.plane.view.slots.values() if slot.model == "tiny" and slot.state == "ready"]
    os.kill(slot.pid, signal.SIGKILL)
    rest = stream.read()
    assert b"[DONE]" not in rest
    error = json.loads(rest.rstrip().rpartition(b"data: ")[2])["error"]
    assert error["code"] == "engine_failed"
    # The next request waits for the engine that takes its place.
    answer = node.openai().chat.completions.create(  # type: ignore[call-overload]
        model="tiny", messages=QUESTION, max_tokens=2, timeout=LOAD_SECONDS
    )
    assert answer.choices[0].message.content


def test_a_client_that_leaves_stops_the_real_engine(node: Node) -> None:
    """TRAPS 26: seen on the engine's own slots, by the lease's end."""
    stream = begin_stream(node, 4000)

    def in_use() -> int:
        return sum(held.in_use for held in node.plane.call(node.plane.leases.held) if held.model == "tiny")

    assert in_use() == 1
    raw = stream.fp.raw._sock  # type: ignore[attr-defined]
    raw.shutdown(socket.SHUT_RDWR)
    raw.close()
    wait_until(lambda: in_use() == 0, 1, "the lease is released")
