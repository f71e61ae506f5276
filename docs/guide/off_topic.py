"""Prompts that have nothing to do with meshd, made up without end.

The model has no knowledge of the world, so "off topic" has to be learnt as "anything that is not one of the
questions": whole sentences, the frames of real questions around foreign things, invented words, long texts,
keyboard noise and other scripts.
"""

from __future__ import annotations

import random
import string

from corpus import HOW_FRAMES, MAX_QUESTION_CHARS, OFF_TOPIC_FILE, WHAT_FRAMES, normalise, read_lists

LISTS = read_lists(OFF_TOPIC_FILE)
NOUNS, VERB_PHRASES, WHOLE, ASKS = LISTS["nouns"], LISTS["verb_phrases"], LISTS["whole"], LISTS["asks"]
SENTENCES, SYLLABLES, LATIN, SCRIPTS = LISTS["sentences"], LISTS["syllables"], LISTS["latin"], LISTS["scripts"]
OPERATIONS = ("+", "-", "*", "/", "plus", "times", "minus", "divided by")
KEY_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")


def pseudo_word(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 4)))


def thing(rng: random.Random) -> str:
    """A noun, sometimes an invented one: the model must refuse words that it has never met."""
    pick = rng.random()
    if pick < 0.60:
        return rng.choice(NOUNS)
    if pick < 0.90:
        return pseudo_word(rng)
    return f"{pseudo_word(rng)} {pseudo_word(rng)}"


def action(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return rng.choice(VERB_PHRASES)
    verb = pseudo_word(rng) if rng.random() < 0.5 else rng.choice(VERB_PHRASES).split()[0]
    return f"{verb} {thing(rng)}"


def fill(frame: str, rng: random.Random) -> str:
    while "{}" in frame:
        frame = frame.replace("{}", thing(rng), 1)
    return frame


def noise(rng: random.Random) -> str:
    """Keyboard noise, repetitions, numbers, punctuation, other alphabets."""
    kind = rng.randrange(8)
    if kind == 0:
        row = rng.choice(KEY_ROWS)
        return " ".join("".join(rng.choices(row, k=rng.randint(2, 9))) for _ in range(rng.randint(1, 4)))
    if kind == 1:
        words = [rng.choices(string.ascii_lowercase, k=rng.randint(2, 10)) for _ in range(rng.randint(1, 6))]
        return " ".join("".join(word) for word in words)
    if kind == 2:
        return rng.choice(string.ascii_lowercase + "0123456789.-") * rng.randint(3, 90)
    if kind == 3:
        return " ".join(str(rng.randrange(10 ** rng.randint(1, 6))) for _ in range(rng.randint(1, 5)))
    if kind == 4:
        return "".join(rng.choices(string.printable[:94], k=rng.randint(3, 40)))
    if kind == 5:
        letters = rng.choice(SCRIPTS)
        return " ".join("".join(rng.choices(letters, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 5)))
    if kind == 6:
        return " ".join(rng.choices(LATIN, k=rng.randint(2, 12)))
    return f"{rng.randint(1, 999)} {rng.choice(OPERATIONS)} {rng.randint(1, 999)}"


def long_text(rng: random.Random) -> str:
    parts = [fill(rng.choice(SENTENCES), rng) for _ in range(rng.randint(2, 4))]
    if rng.random() < 0.3:
        parts = [" ".join(pseudo_word(rng) for _ in range(rng.randint(10, 40)))]
    return rng.choice([" ", ". ", ", "]).join(parts)


def endless(rng: random.Random) -> str:
    """One thing over and over, or a page in a foreign script, up to what the template lets through."""
    kind = rng.randrange(4)
    if kind == 0:
        letters = rng.choice(SCRIPTS)
        text = "".join(rng.choice([*letters, " "]) for _ in range(rng.randint(10, 150)))
    elif kind == 1:
        text = "".join(rng.choices(rng.choice(SCRIPTS), k=rng.randint(1, 4))) * 200
    elif kind == 2:
        text = f"{rng.choice(rng.choice([*SENTENCES, *WHOLE]).split())} " * 200
    else:
        text = "".join(rng.choices(string.printable[:94], k=rng.randint(1, 12))) * 200
    return text[: rng.randint(20, MAX_QUESTION_CHARS)]


def off_topic(rng: random.Random) -> str:
    """One prompt, already normalised."""
    pick = rng.random()
    if pick < 0.26:
        text = rng.choice(WHOLE)
    elif pick < 0.48:
        text = fill(rng.choice(ASKS), rng)
    elif pick < 0.64:
        text = rng.choice(HOW_FRAMES).format(action(rng))
    elif pick < 0.72:
        text = fill(rng.choice(WHAT_FRAMES), rng)
    elif pick < 0.82:
        text = fill(rng.choice(SENTENCES), rng)
    elif pick < 0.88:
        text = long_text(rng)
    elif pick < 0.91:
        text = endless(rng)
    else:
        text = noise(rng)
    return normalise(text)
