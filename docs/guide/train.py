"""Train the guide model: `python docs/guide/train.py` writes docs/guide/meshd-guide.gguf.

One CPU core, a few minutes. The schedule counts sequences, not seconds, so a busy machine trains the same
model, only later; on one machine and one version of PyTorch the same seed gives the same file.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as nnf
from augment import augment, damage, phrase
from corpus import GGUF_FILE, Corpus, base_phrasings, held_out_texts, load_corpus, load_held_out, normalise
from export import write_gguf
from model import Guide, Shape
from off_topic import off_topic
from tokenizer import BOS, BOT, EOS, FIRST_MERGE, USER, Tokenizer, train_merges
from torch import Tensor

IGNORE = -100


@dataclass(frozen=True, kw_only=True)
class Schedule:
    sequences: int = 130_000
    batch: int = 48
    batch_tokens: int = 7_200
    warmup_steps: int = 60
    learning_rate: float = 4e-3
    final_rate: float = 0.02
    weight_decay: float = 0.05
    off_topic_share: float = 0.24
    noisy_share: float = 0.35
    """Questions cut into smaller pieces than usual, which is what a misspelled word looks like."""
    branch_weight: float = 4.0
    """Loss of an answer token where answers part ways; the rest of an answer follows by itself."""
    seed: int = 9337


@dataclass(frozen=True)
class Sample:
    tokens: list[int]
    answer: int
    """Number of the answer; the last one is the refusal."""


class Source:
    """Endless training samples, none of which equals a held-out phrasing."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, forbidden: frozenset[str], schedule: Schedule) -> None:
        self._questions = corpus.questions
        self._tokenizer = tokenizer
        self._forbidden = forbidden
        self._schedule = schedule
        self._rng = random.Random(schedule.seed)
        answers = [question.answer for question in corpus.questions] + [corpus.off_topic_answer]
        self.answers = [[*tokenizer.encode(answer), EOS] for answer in answers]
        self.weights = branch_weights(self.answers, schedule.branch_weight)
        self.skipped = 0

    def _text(self) -> tuple[str, int]:
        rng = self._rng
        if rng.random() < self._schedule.off_topic_share:
            return damage(off_topic(rng), rng), len(self._questions)
        number = rng.randrange(len(self._questions))
        return augment(phrase(self._questions[number], rng), rng), number

    def sample(self) -> Sample:
        text, number = self._text()
        while text in self._forbidden:
            self.skipped += 1
            text, number = self._text()
        if self._rng.random() < self._schedule.noisy_share:
            ids = self._tokenizer.encode_noisy(" " + text, self._rng, self._rng.uniform(0.0, 0.5))
        else:
            ids = self._tokenizer.encode(" " + text)
        return Sample([BOS, USER, *ids, BOT], number)

    def batches(self) -> Iterator[list[Sample]]:
        """Batches of samples of similar length, in random order; fewer samples where they are long."""
        size, most_tokens = self._schedule.batch, self._schedule.batch_tokens
        while True:
            pool = [self.sample() for _ in range(size * 16)]
            pool.sort(key=self._length)
            groups: list[list[Sample]] = [[]]
            for sample in pool:
                group = groups[-1]
                if len(group) == size or (group and (len(group) + 1) * self._length(sample) > most_tokens):
                    groups.append(group := [])
                group.append(sample)
            self._rng.shuffle(groups)
            yield from groups

    def _length(self, sample: Sample) -> int:
        return len(sample.tokens) + len(self.answers[sample.answer])


def branch_weights(answers: list[list[int]], weight: float) -> list[list[float]]:
    """`weight` for each token before which at least two answers share everything and then differ."""
    following: dict[tuple[int, ...], set[int]] = {}
    for answer in answers:
        for at, token in enumerate(answer):
            following.setdefault(tuple(answer[:at]), set()).add(token)
    return [
        [weight if len(following[tuple(answer[:at])]) > 1 else 1.0 for at in range(len(answer))] for answer in answers
    ]


def tensors(batch: list[Sample], source: Source) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets (IGNORE outside of answers) and weights, padded to the longest sample."""
    length = max(len(sample.tokens) + len(source.answers[sample.answer]) for sample in batch) - 1
    inputs = torch.full((len(batch), length), EOS)
    targets = torch.full((len(batch), length), IGNORE)
    weights = torch.zeros((len(batch), length))
    for row, sample in enumerate(batch):
        answer = source.answers[sample.answer]
        sequence = torch.tensor(sample.tokens + answer)
        inputs[row, : len(sequence) - 1] = sequence[:-1]
        first = len(sample.tokens) - 1
        targets[row, first : first + len(answer)] = sequence[first + 1 :]
        weights[row, first : first + len(answer)] = torch.tensor(source.weights[sample.answer])
    return inputs, targets, weights


def rate_at(step: int, done: float, schedule: Schedule) -> float:
    """Linear warm-up, then a cosine down to `final_rate` of the peak; `done` is the share of the training so far."""
    warm = min(1.0, (step + 1) / schedule.warmup_steps)
    share = schedule.final_rate + (1 - schedule.final_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return schedule.learning_rate * warm * share


def train(model: Guide, source: Source, schedule: Schedule) -> None:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=schedule.learning_rate,
        betas=(0.9, 0.95),
    )
    started, done, tokens, smooth, shown = time.monotonic(), 0, 0, float("nan"), 0
    for step, batch in enumerate(source.batches()):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, done / schedule.sequences, schedule)
        inputs, targets, weights = tensors(batch, source)
        wanted = targets != IGNORE
        losses = nnf.cross_entropy(model.logits(model(inputs)[wanted]), targets[wanted], reduction="none")
        loss = (losses * weights[wanted]).sum() / weights.sum() * (len(batch) / schedule.batch)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done += len(batch)
        tokens += inputs.numel()
        smooth = loss.item() if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss.item()
        if (percent := min(100, 100 * done // schedule.sequences)) >= shown + 5:
            shown = percent
            passed = time.monotonic() - started
            left = passed / done * max(0, schedule.sequences - done)
            print(f"{percent:3d} %  loss {smooth:.4f}  {tokens / passed:,.0f} tok/s  {left:.0f} s left", flush=True)
        if done >= schedule.sequences:
            return


@torch.no_grad()
def seen_accuracy(model: Guide, source: Source, corpus: Corpus, tokenizer: Tokenizer) -> float:
    """Share of the base phrasings in `ask` and `keywords` whose whole answer is the most probable one, greedily."""
    right = total = 0
    for number, question in enumerate(corpus.questions):
        answer = torch.tensor(source.answers[number])
        for text in sorted({normalise(text) for text in question.ask + question.keywords}):
            prompt = [BOS, USER, *tokenizer.encode(" " + text), BOT]
            hidden = model(torch.tensor([prompt + source.answers[number]]))[0, len(prompt) - 1 : -1]
            right += bool((model.logits(hidden).argmax(-1) == answer).all())
            total += 1
    return right / total


def build_tokenizer(corpus: Corpus, vocab: int) -> Tokenizer:
    rng = random.Random(0)
    texts = [answer for question in corpus.questions for answer in [question.answer] * 3]
    texts += [" " + text for question in corpus.questions for text in sorted(base_phrasings(question))]
    texts += [" " + off_topic(rng) for _ in range(1500)]
    return Tokenizer(train_merges(texts, vocab - FIRST_MERGE))


def main() -> None:
    schedule, shape = Schedule(), Shape()
    parser = argparse.ArgumentParser(description="Train the guide model.")
    parser.add_argument("--out", type=Path, default=GGUF_FILE)
    parser.add_argument("--sequences", type=int, default=schedule.sequences, help="length of the training")
    parser.add_argument("--seed", type=int, default=schedule.seed)
    arguments = parser.parse_args()
    schedule = Schedule(sequences=arguments.sequences, seed=arguments.seed)

    torch.manual_seed(schedule.seed)
    torch.set_num_threads(1)
    corpus = load_corpus()
    tokenizer = build_tokenizer(corpus, shape.vocab)
    source = Source(corpus, tokenizer, held_out_texts(load_held_out()), schedule)
    model = Guide(shape)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(corpus.questions)} questions, {sum(map(len, map(base_phrasings, corpus.questions)))} base phrasings")
    print(f"{parameters:,} parameters, {schedule.sequences:,} sequences", flush=True)
    train(model, source, schedule)
    print(f"seen phrasings answered exactly: {100 * seen_accuracy(model, source, corpus, tokenizer):.1f} %")
    print(f"samples thrown away because they are held out: {source.skipped}")
    write_gguf(arguments.out, model, tokenizer)
    print(f"{arguments.out.name}: {arguments.out.stat().st_size:,} bytes; now run evaluate.py")


if __name__ == "__main__":
    main()
