"""The guide model's expected answers, read from the text that it was trained from."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

GUIDE_DIRECTORY = Path(__file__).resolve().parents[2] / "docs" / "guide"
GUIDE_GGUF = GUIDE_DIRECTORY / "meshd-guide.gguf"


@dataclass(frozen=True, kw_only=True)
class Question:
    """`ask` is the canonical phrasing. For a canonical question the model gives `answer` to the letter."""

    id: str
    ask: str
    answer: str
    canonical: bool


def load_questions() -> list[Question]:
    with (GUIDE_DIRECTORY / "questions.toml").open("rb") as file:
        entries = tomllib.load(file)["question"]
    return [
        Question(
            id=entry["id"],
            ask=entry["ask"][0],
            answer=entry["answer"],
            canonical=entry.get("canonical", False),
        )
        for entry in entries
    ]


def canonical_questions() -> list[Question]:
    return [question for question in load_questions() if question.canonical]


def off_topic_answer() -> str:
    with (GUIDE_DIRECTORY / "questions.toml").open("rb") as file:
        answer: str = tomllib.load(file)["off_topic"]["answer"]
    return answer
