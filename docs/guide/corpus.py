"""The text the guide model learns from, and the text it must never see.

A question's base phrasings are its `ask` lines as they stand, its `how` and `what` phrases in the frames of
variations.toml, and its `keywords`. `normalise` is the same mapping as the chat template's (see
`export.CHAT_TEMPLATE`): whatever a user types reaches the model lower-cased and without most punctuation, so
training does the same.
"""

from __future__ import annotations

import string
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
QUESTIONS_FILE = HERE / "questions.toml"
HELD_OUT_FILE = HERE / "held_out.toml"
VARIATIONS_FILE = HERE / "variations.toml"
OFF_TOPIC_FILE = HERE / "off_topic.toml"
GGUF_FILE = HERE / "meshd-guide.gguf"

MAX_QUESTION_CHARS = 200
"""Longer messages are cut by the template. Four byte tokens per character at worst, plus an answer, fit
the context."""

REPLACEMENTS: tuple[tuple[str, str], ...] = (
    ("\n", " "), ("\t", " "), ("<", "("), ("?", " "), ("!", " "), (",", " "), (";", " "), ('"', ""), ("`", ""),
    ("’", "'"), (": ", " "), (". ", " "), ("  ", " "), ("  ", " "),
)  # fmt: skip
"""In this order, after lower-casing and with one blank added at the end. Losing `<` is what keeps a user
from writing control tokens."""


def read_lists(path: Path) -> dict[str, tuple[str, ...]]:
    """The top-level lists of strings of a TOML file."""
    with path.open("rb") as file:
        data = tomllib.load(file)
    return {name: tuple(items) for name, items in data.items() if all(isinstance(item, str) for item in items)}


def read_rows(path: Path, name: str) -> tuple[tuple[str, ...], ...]:
    """A list of lists of strings in a TOML file."""
    with path.open("rb") as file:
        return tuple(tuple(row) for row in tomllib.load(file)[name])


HOW_FRAMES = read_lists(VARIATIONS_FILE)["how_frames"]
WHAT_FRAMES = read_lists(VARIATIONS_FILE)["what_frames"]
ASCII_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


@dataclass(frozen=True, kw_only=True)
class Question:
    id: str
    answer: str
    ask: tuple[str, ...]
    how: tuple[str, ...]
    what: tuple[str, ...]
    keywords: tuple[str, ...]
    canonical: bool


@dataclass(frozen=True, kw_only=True)
class Corpus:
    questions: tuple[Question, ...]
    off_topic_answer: str


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """`sets` maps a set's name to (question id, phrasing) pairs; `off_topic` has no ids."""

    sets: dict[str, tuple[tuple[str, str], ...]]
    off_topic: tuple[str, ...]


def normalise(text: str) -> str:
    """What the model sees of a user's message. Like llama.cpp's `lower`, only ASCII letters change."""
    text = text.translate(ASCII_LOWER) + " "
    for old, new in REPLACEMENTS:
        text = text.replace(old, new)
    return text.strip()[:MAX_QUESTION_CHARS]


def load_corpus(path: Path = QUESTIONS_FILE) -> Corpus:
    with path.open("rb") as file:
        data = tomllib.load(file)
    questions = tuple(
        Question(
            id=entry["id"],
            answer=entry["answer"],
            ask=tuple(entry["ask"]),
            how=tuple(entry.get("how", ())),
            what=tuple(entry.get("what", ())),
            keywords=tuple(entry.get("keywords", ())),
            canonical=entry.get("canonical", False),
        )
        for entry in data["question"]
    )
    return Corpus(questions=questions, off_topic_answer=data["off_topic"]["answer"])


def load_held_out(path: Path = HELD_OUT_FILE) -> HeldOut:
    with path.open("rb") as file:
        data = tomllib.load(file)
    off_topic = tuple(data.pop("off_topic")["questions"])
    sets = {
        name: tuple((question_id, text) for question_id, texts in by_id.items() for text in texts)
        for name, by_id in data.items()
    }
    return HeldOut(sets=sets, off_topic=off_topic)


def held_out_texts(held_out: HeldOut) -> frozenset[str]:
    """Every held-out phrasing, normalised: what training must leave alone."""
    texts = {normalise(text) for pairs in held_out.sets.values() for _, text in pairs}
    return frozenset(texts | {normalise(text) for text in held_out.off_topic})


def base_phrasings(question: Question) -> set[str]:
    """Every phrasing of a question before augmentation, normalised."""
    texts = set(question.ask) | set(question.keywords)
    texts |= {frame.format(verb) for verb in question.how for frame in HOW_FRAMES}
    texts |= {frame.format(noun) for noun in question.what for frame in WHAT_FRAMES}
    return {normalise(text) for text in texts}
