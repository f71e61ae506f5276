"""TRAPS 27: one record per request, which outlives its model; and `why REQUEST`."""

from __future__ import annotations

import pytest

from services.proxyd.requests_log import Outcome, RequestRecord, RequestsLog, explain_record
from shared.ids import ModelName, RequestId


def record(request_id: str = "r", **fields: object) -> RequestRecord:
    return RequestRecord(
        request_id=RequestId(request_id), route="/v1/chat/completions", started=100.0, model=ModelName("m"), **fields
    )  # type: ignore[arg-type]


def test_a_request_moves_from_active_to_recent() -> None:
    log = RequestsLog()
    running = record()
    log.begin(running)
    assert (log.active(), log.active_count, log.requests_total) == ([running], 1, 1)
    running.outcome = "ok"
    log.finish(running)
    assert (log.active(), log.recent(5), log.outcomes) == ([], [running], {"ok": 1})


def test_filing_twice_is_a_broken_invariant() -> None:
    log = RequestsLog()
    running = record()
    log.begin(running)
    log.finish(running)
    with pytest.raises(KeyError):
        log.finish(running)


def test_the_ring_is_bounded_and_newest_first() -> None:
    log = RequestsLog(recent_limit=3)
    for number in range(5):
        log.begin(made := record(f"r{number}"))
        log.finish(made)
    assert [item.request_id for item in log.recent(2)] == ["r4", "r3"]
    assert log.find("r1") is None
    assert log.find("r2") is not None
    assert log.requests_total == 5


def test_the_same_id_twice_is_no_mixture() -> None:
    log = RequestsLog()
    first, second = record("same"), record("same")
    log.begin(first)
    log.begin(second)
    log.finish(second)
    assert log.find("same") is first
    log.finish(first)
    assert log.find("same") is first


def test_a_waiting_request_says_what_for() -> None:
    sentences = explain_record(record(reason="m is being loaded"), now=103.0)
    assert "3.0 s" in sentences[0]
    assert sentences[1] == "it waits: m is being loaded"


def test_a_running_request_says_how_far_it_is() -> None:
    assert "not answered yet" in explain_record(record(), now=101.0)[1]
    assert "began after 0.50 s" in explain_record(record(first_byte_seconds=0.5), now=101.0)[1]


def test_a_request_that_went_to_another_node_says_to_which() -> None:
    elsewhere = record(node="barn")
    elsewhere.elsewhere = True
    assert explain_record(elsewhere, now=101.0)[1] == "the engine on barn works on it and has not answered yet"
    elsewhere.outcome = "ok"
    assert "it went to barn" in explain_record(elsewhere, now=101.0)


@pytest.mark.parametrize("outcome", ["ok", "refused", "client_gone", "engine_failed", "error"])
def test_every_ending_has_words(outcome: Outcome) -> None:
    log = RequestsLog()
    ended = record(
        outcome=outcome, status=200, reason="some reason", queue_seconds=2.0, attempts=2, completion_tokens=7,
        tokens_per_second=3.5,
    )  # fmt: skip
    log.begin(ended)
    log.finish(ended)
    text = ". ".join(log.explain("r", now=200.0))
    for part in ("Request r", "for m", "some reason", "waited 2.00 s", "2 attempts", "7 tokens", "3.5 tokens/s"):
        assert part in text
    assert log.explain("unknown", now=200.0) == ()


def test_a_status_sent_before_the_failure_is_no_success() -> None:
    sentences = explain_record(record(outcome="engine_failed", status=200, queue_seconds=0.002), now=1.0)
    assert "failed because its engine did (status 200 was sent)" in sentences[0]
    assert not any("waited 0.00" in sentence for sentence in sentences)


def test_the_speed_of_a_model_is_that_of_its_newest_answer() -> None:
    log = RequestsLog()
    for model, speed in (("m", 10.0), ("other", 5.0), ("m", 20.0), ("m", None)):
        log.begin(made := record(tokens_per_second=speed))
        made.model = ModelName(model)
        log.finish(made)
    assert log.speeds() == {"m": 20.0, "other": 5.0}
