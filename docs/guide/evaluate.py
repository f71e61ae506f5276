"""Measure the guide model on the phrasings that it was never trained on.

`python docs/guide/evaluate.py` runs the model in this directory on xllamacpp; `--endpoint URL` asks a running
server instead: llama-server, or a meshd node. An answer counts only if it is the expected one to the letter.
"""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from corpus import GGUF_FILE, Corpus, HeldOut, load_corpus, load_held_out
from engine import ask, running


@dataclass(frozen=True, kw_only=True)
class Miss:
    set_name: str
    expected: str
    """Id of the question, or off_topic."""
    text: str
    given: str
    """Id of the question whose answer was given, off_topic, or the text if it is nobody's answer."""


@dataclass(frozen=True, kw_only=True)
class Report:
    asked: Counter[str]
    misses: tuple[Miss, ...]

    def percent(self, *set_names: str) -> float:
        asked = sum(self.asked[name] for name in set_names)
        missed = sum(miss.set_name in set_names for miss in self.misses)
        return 100 * (asked - missed) / asked


def evaluate(endpoint: str, corpus: Corpus, held_out: HeldOut, *, model: str = "meshd-guide") -> Report:
    """Asks every held-out phrasing; the sets are held_out's, off_topic, and seen: the trained `ask` lines."""
    answers = {question.id: question.answer for question in corpus.questions}
    answers["off_topic"] = corpus.off_topic_answer
    owner = {answer: name for name, answer in answers.items()}
    sets = dict(held_out.sets)
    sets["off_topic"] = tuple(("off_topic", text) for text in held_out.off_topic)
    sets["seen"] = tuple((question.id, text) for question in corpus.questions for text in question.ask)
    misses: list[Miss] = []
    for set_name, pairs in sets.items():
        for expected, text in pairs:
            answer = ask(endpoint, text, model=model)
            if answer != answers[expected]:
                misses.append(
                    Miss(set_name=set_name, expected=expected, text=text, given=owner.get(answer, repr(answer)))
                )
    return Report(asked=Counter({name: len(pairs) for name, pairs in sets.items()}), misses=tuple(misses))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the guide model on held-out phrasings.")
    parser.add_argument("--gguf", type=Path, default=GGUF_FILE)
    parser.add_argument("--endpoint", help="a server that has the model already, such as http://127.0.0.1:9337")
    parser.add_argument("--model", default="meshd-guide", help="its name there")
    parser.add_argument("--misses", action="store_true", help="print every wrong answer")
    arguments = parser.parse_args()
    held_out = load_held_out()
    source = nullcontext(arguments.endpoint) if arguments.endpoint else running(arguments.gguf)
    with source as endpoint:
        report = evaluate(endpoint, load_corpus(), held_out, model=arguments.model)
    if arguments.misses:
        for miss in report.misses:
            print(f"{miss.set_name:10} {miss.text!r}: expected {miss.expected}, got {miss.given}")
    for name, asked in report.asked.items():
        print(f"{name:10} {asked:5} asked  {report.percent(name):5.1f} % exact")
    print(f"{'held out':10} {sum(report.asked[n] for n in held_out.sets):5} asked  ", end="")
    print(f"{report.percent(*held_out.sets):5.1f} % exact (without off_topic)")


if __name__ == "__main__":
    main()
