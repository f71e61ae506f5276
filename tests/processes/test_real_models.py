"""A whole node with real llama.cpp and tiny models: every type answers unmodified clients; what can not says why."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.engines import tiny_models
from tests.guide.questions import canonical_questions
from tests.processes.node import Node, private_home, wait_for


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """The guide, two llms, an embedding and a reranking model; one llm at a time; 100 MB for models."""
    with private_home() as home:
        folder = home / "my-models"
        folder.mkdir()
        tiny_models.write_llm(folder / "tiny-a.gguf", name="tiny-a")
        tiny_models.write_llm(folder / "tiny-b.gguf", seed=2, name="tiny-b")
        tiny_models.write_llm(folder / "too-large.gguf", seed=3, name="too-large", size=tiny_models.LARGE)
        tiny_models.write_embedding(folder / "tiny-embedding.gguf")
        tiny_models.write_reranking(folder / "tiny-reranking.gguf")
        needs = 40_000_000
        (home / "mesh.toml").write_text(
            f'[models]\nfolders = ["{folder}"]\nserve = ["tiny-a"]\n'
            f"[engine]\nthreads = 1\n[node]\nname = \"desk\"\nmax_vram_bytes = {needs}\n"
        )
        running = Node(home)
        try:
            running.up()
            yield running
        except BaseException:
            print(running.logs())
            raise
        finally:
            running.down()


def test_the_catalog_lists_every_model_with_its_status_and_reason(node: Node) -> None:
    models = {item["id"]: item for item in node.request("GET", "/v1/models").json()["data"]}
    assert set(models) == {"meshd-guide", "tiny-a", "tiny-b", "too-large", "tiny-embedding", "tiny-reranking"}
    assert all(item["reason"] for item in models.values())
    assert models["too-large"]["status"] == "needs_capacity"
    assert models["tiny-embedding"]["type"] == "embedding"


def test_the_guide_answers_word_for_word_through_the_openai_client(node: Node) -> None:
    client = openai.OpenAI(base_url=f"{node.api}/v1", api_key="unused")
    for question in canonical_questions()[:5]:
        answer = client.chat.completions.create(
            model="meshd-guide", messages=[{"role": "user", "content": question.ask}], temperature=0
        )
        assert answer.choices[0].message.content == question.answer


def test_the_same_stream_through_the_openai_client(node: Node) -> None:
    client = openai.OpenAI(base_url=f"{node.api}/v1", api_key="unused")
    question = canonical_questions()[0]
    chunks = client.chat.completions.create(
        model="meshd-guide", messages=[{"role": "user", "content": question.ask}], temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == question.answer


def test_the_same_through_the_anthropic_client(node: Node) -> None:
    client = anthropic.Anthropic(base_url=node.api, api_key="unused")
    question = canonical_questions()[0]
    message = client.messages.create(
        model="meshd-guide", max_tokens=300, messages=[{"role": "user", "content": question.ask}]
    )
    assert "".join(block.text for block in message.content if block.type == "text") == question.answer


def test_embeddings_and_reranking(node: Node) -> None:
    client = openai.OpenAI(base_url=f"{node.api}/v1", api_key="unused")
    made = client.embeddings.create(model="tiny-embedding", input=["one", "two"], encoding_format="float")
    assert len(made.data) == 2
    assert len(made.data[0].embedding) > 8
    ranked = node.request("POST", "/v1/rerank", {"model": "tiny-reranking", "query": "q", "documents": ["a", "b", "c"]})
    assert ranked.status == 200
    assert {item["index"] for item in ranked.json()["results"]} == {0, 1, 2}


def test_alternating_models_evict_each_other_and_always_answer(node: Node) -> None:
    texts: dict[str, set[str]] = {"tiny-a": set(), "tiny-b": set()}
    for _ in range(3):
        for model in texts:
            answer = node.chat(model, "hello", max_tokens=8, temperature=0)
            assert answer.status == 200, answer.body
            texts[model].add(answer.json()["choices"][0]["message"]["content"])
    assert all(len(said) == 1 for said in texts.values()), "the same question, the same answer, after every reload"
    why = node.meshctl("why", "tiny-a").stdout
    assert "tiny-b" in why, f"why says who took its place: {why}"


def test_a_model_that_cannot_fit_is_refused_with_the_numbers_and_counted(node: Node) -> None:
    answer = node.chat("too-large", "hello")
    assert answer.status == 503
    assert "MB" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) > 0
    wait_for(lambda: "asked for too-large 1 times" in node.meshctl("why", "too-large").stdout, 10, "the count")


def test_an_unknown_model_is_not_found_with_the_nearest_name(node: Node) -> None:
    answer = node.chat("tiny-c", "hello")
    assert answer.status == 404
    assert "tiny-a" in answer.json()["error"]["message"]
