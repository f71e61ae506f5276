"""Turn the phrasings of questions.toml into the many ways in which people write them.

Works on normalised text and on the question only. Every function takes its chance from `rng`.
"""

from __future__ import annotations

import random
import string

from corpus import HOW_FRAMES, VARIATIONS_FILE, WHAT_FRAMES, Question, normalise, read_lists, read_rows
from off_topic import fill

LISTS = read_lists(VARIATIONS_FILE)
PREFIXES, SUFFIXES, OPENERS = LISTS["prefixes"], LISTS["suffixes"], LISTS["openers"]
STOP_WORDS = frozenset(LISTS["stop_words"])
SYNONYMS = read_rows(VARIATIONS_FILE, "synonyms")
CONTRACTIONS = read_rows(VARIATIONS_FILE, "contractions")
KEYBOARD = dict(zip(string.ascii_lowercase, "svxsrghjoklknmpowtdyibecux", strict=True))
"""A neighbour of each key."""


def typo(text: str, rng: random.Random) -> str:
    """Damage one word of four letters or more, preferably one that matters.

    Digits stay as they are: 404 and 503 are different questions.
    """
    words = text.split(" ")
    places = [i for i, word in enumerate(words) if len(word) > 3 and word.isalpha() and word.isascii()]
    telling = [i for i in places if words[i] not in STOP_WORDS]
    if not places:
        return text
    place = rng.choice(telling if telling and rng.random() < 0.8 else places)
    word = words[place]
    at = rng.randrange(len(word) - 1)
    kind = rng.randrange(6)
    if kind <= 2:
        word = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    elif kind == 3:
        word = word[: at + 1] + word[at + 2 :]
    elif kind == 4:
        word = word[: at + 1] + word[at:]
    else:
        word = word[:at] + KEYBOARD[word[at]] + word[at + 1 :]
    words[place] = word
    return " ".join(words)


def swap_phrase(text: str, table: tuple[tuple[str, ...], ...], rng: random.Random, both_ways: bool) -> str:
    """Replace one phrase by another of its row, by a later one only unless `both_ways`."""
    for row in rng.sample(table, len(table)):
        sources = [word for word in (row if both_ways else row[:1]) if f" {word} " in f" {text} "]
        if sources:
            source = rng.choice(sources)
            target = rng.choice([word for word in row if word != source])
            return f" {text} ".replace(f" {source} ", f" {target} ", 1).strip()
    return text


def drop_words(text: str, rng: random.Random) -> str:
    kept = [word for word in text.split(" ") if rng.random() > (0.25 if word in STOP_WORDS else 0.04)]
    return " ".join(kept) or text


def swap_words(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    if len(words) > 2:
        at = rng.randrange(len(words) - 1)
        words[at], words[at + 1] = words[at + 1], words[at]
    return " ".join(words)


def content_words(text: str, rng: random.Random) -> str:
    """What remains when somebody types keywords only."""
    words = [word for word in text.split(" ") if word not in STOP_WORDS]
    return f"{rng.choice(OPENERS)} {' '.join(words)}".strip() if words else text


def reframe(text: str, rng: random.Random) -> str:
    """ "how do i X" in another frame."""
    for opening in ("how do i ", "how can i ", "can i "):
        if text.startswith(opening):
            return rng.choice(HOW_FRAMES).format(text.removeprefix(opening))
    return text


def phrase(question: Question, rng: random.Random) -> str:
    """A base phrasing: an `ask` line in half of the cases, the other sources sharing the rest."""
    sources = [kind for kind in ("how", "how", "what", "keywords") if getattr(question, kind)]
    if rng.random() < 0.5 or not sources:
        text = normalise(rng.choice(question.ask))
        return reframe(text, rng) if rng.random() < 0.5 else text
    kind = rng.choice(sources)
    if kind == "how":
        return normalise(rng.choice(HOW_FRAMES).format(rng.choice(question.how)))
    if kind == "what":
        return normalise(rng.choice(WHAT_FRAMES).format(rng.choice(question.what)))
    return normalise(rng.choice(question.keywords))


def augment(text: str, rng: random.Random) -> str:
    """One variation of a normalised question; the text itself in about one case of eight."""
    if rng.random() < 0.12:
        return text
    if rng.random() < 0.35:
        text = swap_phrase(text, SYNONYMS, rng, both_ways=True)
    if rng.random() < 0.25:
        text = swap_phrase(text, CONTRACTIONS, rng, both_ways=False)
    if rng.random() < 0.18:
        text = content_words(text, rng)
    elif rng.random() < 0.25:
        text = drop_words(text, rng)
    if rng.random() < 0.05:
        text = swap_words(text, rng)
    if rng.random() < 0.14:
        text = f"{rng.choice(PREFIXES)} {text}"
    if rng.random() < 0.10:
        text = f"{text} {rng.choice(SUFFIXES)}"
    while rng.random() < 0.36:
        text = typo(text, rng)
    return normalise(text)


def damage(text: str, rng: random.Random) -> str:
    """The same wear on off-topic text, so that wear itself says nothing about the topic."""
    if rng.random() < 0.10:
        text = f"{rng.choice(PREFIXES)} {text}"
    if rng.random() < 0.08:
        text = f"{text} {rng.choice(SUFFIXES)}"
    if rng.random() < 0.10:
        text = content_words(text, rng)
    while rng.random() < 0.25:
        text = typo(text, rng)
    return normalise(fill(text, rng))
