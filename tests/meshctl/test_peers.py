"""What ``peers`` says of a node in one word or two."""

from __future__ import annotations

import pytest

from services.meshctl.peers import state_words


@pytest.mark.parametrize(
    ("state", "node_state", "words"),
    [
        ("alive", "active", "alive"),
        ("alive", "draining", "alive, draining"),
        ("suspect", "joining", "suspect, joining"),
        ("left", "leaving", "left"),
        ("dead", "active", "dead"),
        ("alive", "", "alive"),
    ],
)
def test_a_nodes_own_word_counts_while_it_is_there(state: str, node_state: str, words: str) -> None:
    assert state_words(state, node_state) == words
