"""Ids that processes make for themselves."""

from __future__ import annotations

import re

from shared.io.fresh_ids import new_boot_id, new_request_id


def test_new_ids_are_hex_of_a_fixed_length_and_never_repeat() -> None:
    for make, digits in ((new_boot_id, 16), (new_request_id, 24)):
        ids = [make() for _ in range(1000)]
        assert len(set(ids)) == 1000
        assert all(re.fullmatch(rf"[0-9a-f]{{{digits}}}", text) for text in ids)
