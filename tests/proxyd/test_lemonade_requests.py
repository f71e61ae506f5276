"""What bodies become, and what they never become."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.proxyd.lemonade_requests import (
    DeleteBody,
    LoadBody,
    LoadPlan,
    PinBody,
    PullBody,
    SetBody,
    UnloadBody,
    delete_message,
    dump_load,
    failure_of,
    pin_message,
    plan_load,
    read_body,
    set_limits,
    unload_message,
)
from services.proxyd.local_view import LocalView
from services.proxyd.replies import Failure
from shared.errors import RequestRefused
from shared.ids import ModelName
from shared.messages.downloads import DeleteModel, PullModel, RegisteredModel, RegistryChanged
from shared.messages.models import (
    InventoryChanged,
    LoadModel,
    LocalModel,
    PinModel,
    SetMaxLoadedModels,
    UnloadModel,
)

HERE = LocalModel(
    name=ModelName("here"), type="llm", path="/m/here.gguf", file_size_bytes=1, checkpoint="org/here:Q4"
)
WHISPER = LocalModel(name=ModelName("whisper"), type="audio", path="/m/w.bin", file_size_bytes=1, recipe="whispercpp")
DIFFUSION = LocalModel(name=ModelName("sd"), type="image", path="/m/sd", file_size_bytes=1, recipe="sd-cpp")


def view(*, scanning: bool = False) -> LocalView:
    made = LocalView()
    made.apply(InventoryChanged(models=(HERE, WHISPER, DIFFUSION), scanning=scanning), now=0)
    registered = RegisteredModel(name=ModelName("known"), checkpoint="org/known:Q4")
    made.apply(RegistryChanged(models=(registered,)), now=0)
    return made


def plan(**fields: Any) -> LoadPlan:
    return plan_load(read_body(LoadBody, json.dumps(fields).encode()), view())


def failure(**fields: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        plan(**fields)
    return caught.value


def test_a_load_with_every_option() -> None:
    """docs/spec/lemonade.md 14 and 15: arguments are split like a shell does."""
    made = plan(
        model_name="here", ctx_size=8192, llamacpp_backend="vulkan", pinned=True,
        llamacpp_args="--flash-attn on --chat-template 'a b'",
    )  # fmt: skip
    assert made == LoadPlan(
        LoadModel(
            model=ModelName("here"), context_tokens=8192, backend="vulkan", pinned=True,
            extra_args=("--flash-attn", "on", "--chat-template", "a b"),
        ),
        None,
        (),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, LoadModel(model=ModelName("here"))),
        ({"ctx_size": -1, "llamacpp_args": None, "pinned": None}, LoadModel(model=ModelName("here"))),
        ({"llamacpp_args": ""}, LoadModel(model=ModelName("here"), extra_args=())),
        ({"pinned": False}, LoadModel(model=ModelName("here"), pinned=False)),
    ],
)
def test_what_is_left_out_stays_as_configured(fields: dict[str, Any], expected: LoadModel) -> None:
    assert plan(model_name="here", **fields).load == expected


def test_sampling_fields_never_become_options_of_an_engine() -> None:
    """docs/spec/lemonade.md 14, TRAPS 25: nothing else has an effect; the answer names such fields in `ignored`."""
    made = plan(model_name="here", temperature=0.7, max_tokens=5, extra_args=["--host"], save_options=True)
    assert made.load == LoadModel(model=ModelName("here"))
    assert made.ignored == ("extra_args", "max_tokens", "save_options", "temperature")
    assert dump_load(made, view())["ignored"] == list(made.ignored)


def test_a_loads_answer_names_the_checkpoint_and_not_where_it_lies() -> None:
    """docs/spec/lemonade.md 12."""
    assert dump_load(plan(model_name="here"), view())["checkpoint"] == "org/here:Q4"
    assert dump_load(plan(model_name="whisper"), view())["checkpoint"] == "w.bin"


@settings(max_examples=30)
@given(st.dictionaries(st.text(max_size=20), st.recursive(st.none() | st.integers() | st.text(), st.lists), max_size=6))
def test_whatever_a_body_holds_only_known_fields_have_an_effect(fields: dict[str, Any]) -> None:
    known = {name for field, info in LoadBody.model_fields.items() for name in (field, "sd-cpp_args", "sd-cpp_backend")}
    strange = {name: value for name, value in fields.items() if name not in known | {"model"}}
    made = plan(**{**strange, "model_name": "here"})
    assert made.load == LoadModel(model=ModelName("here"))
    assert set(made.ignored) == set(strange)


def test_a_name_may_be_that_of_the_file_and_the_field_may_be_model() -> None:
    assert plan(model="here.gguf").load.model == "here"


@pytest.mark.parametrize(
    ("model", "fields", "backend", "args", "ignored"),
    [
        ("whisper", {"whispercpp_backend": "npu", "whispercpp_args": "--convert"}, "npu", ("--convert",), ()),
        ("whisper", {"llamacpp_args": "--no-mmap"}, "", None, ("llamacpp_args",)),
        ("here", {"whispercpp_args": "--convert", "flm_args": "x"}, "", None, ("flm_args", "whispercpp_args")),
        ("sd", {"sd-cpp_backend": "rocm", "sdcpp_args": "--steps 4"}, "rocm", ("--steps", "4"), ()),
    ],
)
def test_options_are_those_of_the_models_own_recipe(
    model: str, fields: dict[str, Any], backend: str, args: tuple[str, ...] | None, ignored: tuple[str, ...]
) -> None:
    made = plan(model_name=model, **fields)
    assert (made.load.backend, made.load.extra_args, made.ignored) == (backend, args, ignored)


def test_a_registered_model_that_is_not_here_is_downloaded_first() -> None:
    """docs/spec/lemonade.md 16."""
    made = plan(model_name="known", ctx_size=512)
    assert made.pull == PullModel(model="known")
    assert made.load == LoadModel(model=ModelName("known"), context_tokens=512)


def test_an_unknown_model_is_registered_by_the_load() -> None:
    """docs/spec/lemonade.md 14."""
    made = plan(
        model_name="user.mine", checkpoint="me/mine:Q4", recipe="llamacpp", reasoning=True, vision=True,
        labels=["coding", "vision"], mmproj="mmproj.gguf",
    )  # fmt: skip
    assert made.pull == PullModel(
        model="user.mine", checkpoint="me/mine:Q4", recipe="llamacpp", labels=("coding", "vision", "reasoning"),
        mmproj="mmproj.gguf",
    )  # fmt: skip


def test_a_model_that_nobody_knows_is_404_with_the_nearest_names() -> None:
    """docs/spec/lemonade.md 16."""
    error = failure(model_name="here2")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model_name")
    assert "Nearest: here" in error.message
    assert "show_all" in error.message


def test_while_the_disk_is_being_read_launcherd_decides() -> None:
    made = plan_load(read_body(LoadBody, b'{"model_name":"later"}'), view(scanning=True))
    assert made == LoadPlan(LoadModel(model=ModelName("later")), None, ())


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({}, "model_name"),
        ({"model_name": ""}, "model_name"),
        ({"model_name": 5}, "model_name"),
        ({"model_name": "here", "ctx_size": "large"}, "ctx_size"),
        ({"model_name": "here", "ctx_size": 1.5}, "ctx_size"),
        ({"model_name": "here", "ctx_size": True}, "ctx_size"),
        ({"model_name": "here", "ctx_size": -2}, "ctx_size"),
        ({"model_name": "here", "ctx_size": 10**12}, "ctx_size"),
        ({"model_name": "here", "pinned": "yes"}, "pinned"),
        ({"model_name": "here", "llamacpp_args": ["-x"]}, "llamacpp_args"),
        ({"model_name": "here", "llamacpp_args": "--x 'open"}, "llamacpp_args"),
        ({"model_name": "here", "labels": "one"}, "labels"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(fields: dict[str, Any], where: str) -> None:
    """docs/spec/lemonade.md 6 and 15."""
    error = failure(**fields)
    assert error.status == 400
    assert error.param == where
    assert where in error.message


@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b"5", b'"x"', b"\xff", b"nonsense"])
def test_what_is_no_json_object_is_400(body: bytes) -> None:
    """docs/spec/lemonade.md 6; 18: a body that cannot be read unloads nothing."""
    for kind in (LoadBody, UnloadBody, PullBody, DeleteBody, PinBody, SetBody):
        with pytest.raises(Failure) as caught:
            read_body(kind, body)
        assert (caught.value.status, caught.value.code) == (400, "invalid_json"), kind


@given(st.binary(max_size=200))
def test_random_bytes_only_ever_fail_with_400(body: bytes) -> None:
    for kind in (LoadBody, SetBody, PullBody):
        status = 400
        try:
            read_body(kind, body)
        except Failure as error:
            status = error.status
        assert status == 400


def test_unload_one_or_all() -> None:
    """docs/spec/lemonade.md 18."""
    for body in (b"", b"  ", b"{}", b'{"model_name":""}', b'{"model_name":null}'):
        assert unload_message(read_body(UnloadBody, body), view()) == UnloadModel()
    for body in (b'{"model_name":"here"}', b'{"model":"here.gguf"}'):
        assert unload_message(read_body(UnloadBody, body), view()) == UnloadModel(model=ModelName("here"))


def test_launcherd_is_asked_by_its_own_name() -> None:
    """docs/spec/lemonade.md 24."""
    mine, theirs = ModelName("here"), ModelName("here~1f2e")
    made = LocalView(lambda name: theirs if name == mine else name, lambda name: mine if name == theirs else name)
    made.apply(InventoryChanged(models=(HERE,)), now=0)
    body = b'{"model_name":"here~1f2e","pinned":true}'
    planned = plan_load(read_body(LoadBody, body), made)
    assert planned.load.model == mine
    assert dump_load(planned, made)["model_name"] == theirs
    assert unload_message(read_body(UnloadBody, body), made).model == mine
    assert pin_message(read_body(PinBody, body), made).model == mine
    assert delete_message(read_body(DeleteBody, body), made).model == mine


def test_pull_and_its_labels() -> None:
    assert read_body(PullBody, b'{"model":"known","stream":true}').stream
    body = {
        "model_name": "user.m", "recipe": "llamacpp", "embedding": True, "reranking": False, "image": True,
        "checkpoints": {"main": "o/r:Q4", "mmproj": "o/r:mmproj-f16.gguf"}, "do_not_upgrade": True,
    }  # fmt: skip
    assert read_body(PullBody, json.dumps(body).encode()).pull() == PullModel(
        model="user.m", checkpoint="o/r:Q4", recipe="llamacpp", labels=("embeddings", "image"), mmproj="mmproj-f16.gguf"
    )


def test_delete_and_pin() -> None:
    assert delete_message(read_body(DeleteBody, b'{"model":"here.gguf"}'), view()) == DeleteModel(
        model=ModelName("here")
    )
    pinned = pin_message(read_body(PinBody, b'{"model_name":"here","pinned":false}'), view())
    assert pinned == PinModel(model=ModelName("here"), pinned=False)
    for body in (b'{"model_name":"here"}', b'{"model_name":"here","pinned":"true"}', b'{"pinned":true}'):
        with pytest.raises(Failure):
            read_body(PinBody, body)


@pytest.mark.parametrize(
    ("given", "limits"), [(1, (1,)), (-1, (-1,)), (3, (3,)), ([5, 2, 4], (5, 2, 4)), ([-1], (-1,))]
)
def test_limits(given: Any, limits: tuple[int, ...]) -> None:
    body = json.dumps({"max_loaded_models": given}).encode()
    assert set_limits(read_body(SetBody, body)) == SetMaxLoadedModels(limits=limits)


@pytest.mark.parametrize("given", [0, -2, [], [1, 0], [1, 2, 3, 4, 5, 6], "3", True, 1.5, None, [None]])
def test_limits_that_cannot_be(given: Any) -> None:
    """docs/spec/lemonade.md 20: 0, less than -1 and any other setting are 400."""
    with pytest.raises(Failure) as caught:
        set_limits(read_body(SetBody, json.dumps({"max_loaded_models": given}).encode()))
    assert caught.value.status == 400
    assert "max_loaded_models" in caught.value.message
    assert caught.value.param in ("max_loaded_models", None)
    assert given is None or "-1 for no limit" in caught.value.message


@pytest.mark.parametrize("body", [b'{"log_level":"debug"}', b'{"max_loaded_models":2,"log_level":"debug"}'])
def test_another_setting_is_refused_with_the_list_of_what_can_be_set(body: bytes) -> None:
    """docs/spec/lemonade.md 20."""
    with pytest.raises(Failure) as caught:
        set_limits(read_body(SetBody, body))
    assert (caught.value.status, caught.value.param) == (400, "log_level")
    assert "max_loaded_models" in caught.value.message


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("option_refused", 400), ("config", 400), ("not_loaded", 404), ("model_not_found", 404), ("unloaded", 409),
        ("overloaded", 429), ("engine_exited", 500), ("model_too_large", 500), ("something_new", 500), ("idle", 503),
    ],
)  # fmt: skip
def test_refusals_in_http(code: str, status: int) -> None:
    """docs/spec/lemonade.md 17."""
    error = failure_of(RequestRefused(code, "words"))
    assert (error.status, error.code, error.message) == (status, code, "words")
    assert (error.retry_after_seconds is not None) == (status in (429, 503))


def test_what_only_pins_stand_in_the_way_of_has_the_code_that_clients_know() -> None:
    """docs/spec/lemonade.md 17."""
    error = failure_of(RequestRefused("all_pinned", "unpin one"))
    assert (error.status, error.code) == (409, "slots_pinned_error")
