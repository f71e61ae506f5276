from __future__ import annotations

from services.gossipd.chance import number, shuffled, some


def test_the_same_parts_make_the_same_choice() -> None:
    items = [f"p{index}" for index in range(50)]
    assert shuffled(items, 1, "x") == shuffled(reversed(items), 1, "x")
    assert shuffled(items, 1, "x") != shuffled(items, 2, "x")
    assert sorted(shuffled(items, 1)) == sorted(items)
    assert some(items, 3, 5) == shuffled(items, 5)[:3]
    assert number("a", "b") != number("ab")
