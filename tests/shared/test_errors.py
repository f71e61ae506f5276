"""Codes are the stable words that cross process boundaries; blame is in the type."""

from __future__ import annotations

import pytest

from shared import errors
from shared.errors import (
    EngineExited,
    InviteRefused,
    LoadFailed,
    MeshError,
    ModelFileMissing,
    RequestRefused,
    SchemaError,
    UnknownTag,
)

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MeshError)]
CODE_PER_INSTANCE = (RequestRefused, InviteRefused)
CODE_PER_CLASS = [kind for kind in KINDS if kind not in CODE_PER_INSTANCE]


def test_every_kind_has_a_code_of_its_own() -> None:
    codes = [kind.code for kind in CODE_PER_CLASS]
    assert len(set(codes)) == len(codes)
    assert all(code.islower() and code.replace("_", "").isalpha() for code in codes)


@pytest.mark.parametrize("kind", CODE_PER_CLASS, ids=lambda kind: kind.__name__)
def test_the_detail_is_the_text(kind: type[MeshError]) -> None:
    error = kind("what, why, what next")
    assert error.detail == str(error) == "what, why, what next"


def test_a_refusal_keeps_the_code_of_the_daemon_that_refused() -> None:
    error = RequestRefused("overloaded", "try later", 2.0)
    assert (error.code, error.detail, error.retry_after_seconds) == ("overloaded", "try later", 2.0)
    assert RequestRefused.code == "error", "the class is not changed by an instance"


def test_a_refused_invite_says_which_way() -> None:
    error = InviteRefused("expired", "it expired an hour ago")
    assert (error.code, error.detail) == ("expired", "it expired an hour ago")


def test_blame_can_be_told_by_type() -> None:
    assert issubclass(UnknownTag, SchemaError)
    assert issubclass(ModelFileMissing, LoadFailed)
    assert EngineExited("gone", -9).status == -9
