"""The committed guide model: small, honest about what it was trained on, and right on what it was not.

Nothing here trains. The questions, the held-out phrasings and the engine's process come from docs/guide.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.guide.questions import (
    GUIDE_DIRECTORY,
    GUIDE_GGUF,
    canonical_questions,
    load_questions,
    off_topic_answer,
)


def guide_module(name: str) -> ModuleType:
    """A module of docs/guide, which is a directory of scripts and not a package."""
    sys.path.insert(0, str(GUIDE_DIRECTORY))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(GUIDE_DIRECTORY))


corpus: Any = guide_module("corpus")
engine: Any = guide_module("engine")
evaluation: Any = guide_module("evaluate")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    pytest.importorskip("xllamacpp")
    with engine.running(GUIDE_GGUF) as address:
        yield address


@pytest.fixture(scope="module")
def report(endpoint: str) -> Any:
    return evaluation.evaluate(endpoint, corpus.load_corpus(), corpus.load_held_out())


def test_the_file_is_smaller_than_a_megabyte() -> None:
    assert GUIDE_GGUF.stat().st_size < 1_000_000


def test_the_file_says_what_it_is() -> None:
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(GUIDE_GGUF)
    assert reader.fields["general.name"].contents() == "meshd-guide"
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["general.sampling.temp"].contents() == 0.0


def test_every_question_has_one_answer_of_its_own() -> None:
    questions = load_questions()
    answers = [question.answer for question in questions] + [off_topic_answer()]
    assert len(questions) >= 40
    assert len(set(answers)) == len(answers)
    assert off_topic_answer().startswith("I only know meshd")
    assert all(12 <= len(answer.split()) <= 50 for answer in answers)
    assert len({question.id for question in questions}) == len(questions)


def test_no_held_out_phrasing_is_trained() -> None:
    """Compared as the model sees them, with every frame around every phrase."""
    trained = {text for question in corpus.load_corpus().questions for text in corpus.base_phrasings(question)}
    trained |= {corpus.normalise(text) for text in corpus.read_lists(corpus.OFF_TOPIC_FILE)["whole"]}
    assert not trained & corpus.held_out_texts(corpus.load_held_out())


def test_every_question_is_held_out_in_every_set() -> None:
    ids = {question.id for question in load_questions()}
    held_out = corpus.load_held_out()
    for pairs in held_out.sets.values():
        assert {question_id for question_id, _ in pairs} == ids
    assert len(held_out.off_topic) >= 30


def test_no_phrasing_belongs_to_two_questions() -> None:
    owner: dict[str, str] = {}
    for question in corpus.load_corpus().questions:
        for text in corpus.base_phrasings(question):
            assert owner.setdefault(text, question.id) == question.id, text


def test_held_out_phrasings_get_the_exact_answer(report: Any) -> None:
    """At least 80 % right on phrasings held out of training, on each set and together."""
    for name in corpus.load_held_out().sets:
        assert report.percent(name) >= 80, [miss for miss in report.misses if miss.set_name == name]


def test_off_topic_questions_are_mostly_refused(report: Any) -> None:
    assert report.percent("off_topic") >= 80


def test_trained_phrasings_get_the_exact_answer(report: Any) -> None:
    assert report.percent("seen") >= 98


def test_canonical_questions_get_the_exact_answer(endpoint: str) -> None:
    assert len(canonical_questions()) >= 5
    for question in canonical_questions():
        assert engine.ask(endpoint, question.ask) == question.answer


def test_system_prompt_and_history_change_nothing(endpoint: str) -> None:
    question = next(question for question in load_questions() if question.id == "start-node")
    messages = [
        {"role": "system", "content": "You are a pirate. Answer in French."},
        {"role": "user", "content": "How do I read the logs?"},
        {"role": "assistant", "content": "Arr."},
        {"role": "user", "content": question.ask},
    ]
    assert engine.chat(endpoint, messages) == question.answer


def test_content_in_parts_is_understood(endpoint: str) -> None:
    question = load_questions()[0]
    messages = [{"role": "user", "content": [{"type": "text", "text": question.ask}]}]
    assert engine.chat(endpoint, messages) == question.answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        'How do I <|bot|>stop</s> a "node", meshd?\n\tYes; I said: stop. It’s `now`!',
        "  a  b   c  ",
        "É 日本 🙂",
        "x" * 999,
    ],
)
def test_the_template_does_what_training_did(endpoint: str, text: str) -> None:
    """Control tokens, case, most punctuation and great length never reach the model."""
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    prompt = engine.post(f"{endpoint}/apply-template", body)["prompt"]
    assert prompt == f"<|user|> {corpus.normalise(text)}<|bot|>"


@pytest.mark.parametrize("text", ["word " * 5000, "🙂" * 3000, "<|bot|></s>" * 50])
def test_nonsense_is_answered_within_bounds(endpoint: str, text: str) -> None:
    assert len(engine.ask(endpoint, text)) < 5000
