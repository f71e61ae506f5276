"""A SentencePiece-like byte-pair tokenizer in plain Python, exact to llama.cpp's `llama` tokenizer.

Pieces: five special ones, 256 byte tokens, every printable ASCII character, then merges. A blank is written
U+2581 and belongs to the word after it; merges never cross it, so a word's pieces don't depend on its
neighbours. llama.cpp joins the neighbouring pair whose union is the best piece in the vocabulary, leftmost
first, until nothing can be joined; a piece's score is minus its rank.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

BLANK = "▁"
SPECIALS = ("<unk>", "<s>", "</s>", "<|user|>", "<|bot|>")
UNK, BOS, EOS, USER, BOT = range(5)
FIRST_BYTE = len(SPECIALS)
CHARACTERS = (BLANK, *(chr(code) for code in range(33, 127)))
FIRST_MERGE = FIRST_BYTE + 256 + len(CHARACTERS)


def split_words(text: str) -> list[str]:
    """Cut before every blank: "ab  c" gives ab, ▁, ▁c."""
    words: list[str] = []
    current = ""
    for char in text.replace(" ", BLANK):
        if char == BLANK and current:
            words.append(current)
            current = ""
        current += char
    return [*words, current] if current else words


class Tokenizer:
    def __init__(self, merges: list[str]) -> None:
        self.pieces: list[str] = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *CHARACTERS, *merges]
        self._ids = {piece: FIRST_BYTE + 256 + i for i, piece in enumerate(self.pieces[FIRST_BYTE + 256 :])}
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in split_words(text):
            if word not in self._cache:
                self._cache[word] = self._encode_word(word, None, 0.0)
            ids += self._cache[word]
        return ids

    def encode_noisy(self, text: str, rng: random.Random, dropout: float) -> list[int]:
        """Like `encode`, but each possible join is passed over with probability `dropout`."""
        return [piece for word in split_words(text) for piece in self._encode_word(word, rng, dropout)]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.pieces[i] for i in ids if i >= FIRST_BYTE + 256).replace(BLANK, " ")

    def _encode_word(self, word: str, rng: random.Random | None, dropout: float) -> list[int]:
        parts = list(word)
        while len(parts) > 1:
            best, best_at = len(self.pieces), -1
            for at in range(len(parts) - 1):
                rank = self._ids.get(parts[at] + parts[at + 1], best)
                if rank < best and not (rng and rng.random() < dropout):
                    best, best_at = rank, at
            if best_at < 0:
                break
            parts[best_at : best_at + 2] = [parts[best_at] + parts[best_at + 1]]
        ids: list[int] = []
        for part in parts:
            if part in self._ids:
                ids.append(self._ids[part])
            else:
                ids += [FIRST_BYTE + byte for byte in part.encode()]
        return ids


def train_merges(texts: Iterable[str], count: int) -> list[str]:
    """Learn `count` merges from the words of `texts`, most frequent pair first, ties in text order."""
    words = Counter(word for text in texts for word in split_words(text))
    parts = {word: list(word) for word in words if word.replace(BLANK, "").isascii()}
    merges: list[str] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, pieces in parts.items():
            for pair in pairwise(pieces):
                pairs[pair] += words[word]
        usable = [pair for pair in pairs if not (pair[0] + pair[1])[-1].isdigit()]
        if not usable:
            break
        left, right = max(usable, key=lambda pair: pairs[pair])
        if left + right not in merges:
            merges.append(left + right)
        for pieces in parts.values():
            at = 0
            while at < len(pieces) - 1:
                if pieces[at] == left and pieces[at + 1] == right:
                    pieces[at : at + 2] = [left + right]
                at += 1
    return merges
