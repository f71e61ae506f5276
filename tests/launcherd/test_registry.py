"""The registry: catalog, user entries, names. Rules: docs/spec/registry.md."""

from __future__ import annotations

import json

import pytest

from services.launcherd.download_events import Wanted
from services.launcherd.model_catalog import CATALOG
from services.launcherd.model_source import HubSource, SourceRefused, check_name, checkpoint_of, parse_source
from services.launcherd.registry import Registry, is_local, read_entries, type_of
from shared.ids import ModelName
from shared.messages.downloads import PullModel
from shared.recipes import BUILTIN_RECIPES


def resolve(registry: Registry, model: str, *on_disk: str, **fields: object) -> Wanted:
    request = PullModel(model=model, **fields)  # type: ignore[arg-type]
    return registry.resolve(request, [ModelName(name) for name in on_disk])


def refusal(registry: Registry, model: str, *on_disk: str, **fields: object) -> SourceRefused:
    with pytest.raises(SourceRefused) as refused:
        resolve(registry, model, *on_disk, **fields)
    return refused.value


@pytest.fixture
def registry() -> Registry:
    return Registry()


def test_the_catalog_can_be_fetched_and_covers_the_types() -> None:
    """The catalog names repositories and quantisations, each model once, types by their labels."""
    assert len({entry.name.lower() for entry in CATALOG}) == len(CATALOG) >= 12
    assert {entry.type for entry in CATALOG} == {"llm", "embedding", "reranking"}
    for entry in CATALOG:
        check_name(entry.name)
        source = parse_source(entry.checkpoint)
        assert isinstance(source, HubSource)
        assert source.quantization
        assert checkpoint_of(source) == entry.checkpoint
        assert type_of(entry.labels) == entry.type


def test_a_name_of_the_catalog_in_any_case(registry: Registry) -> None:
    wanted = resolve(registry, "qwen3-0.6b")
    assert wanted == Wanted(
        name=ModelName("Qwen3-0.6B"), checkpoint="Qwen/Qwen3-0.6B-GGUF:Q8_0", labels=("reasoning", "tool-calling")
    )


def test_an_unknown_name_is_refused_with_the_nearest(registry: Registry) -> None:
    error = refusal(registry, "Qwen3-0.6")
    assert error.code == "model_not_found"
    assert "did you mean Qwen3-0.6B" in error.detail
    assert "models list --all" in refusal(registry, "zzzzz").detail


def test_a_repository_that_the_catalog_knows_is_that_entry(registry: Registry) -> None:
    assert resolve(registry, "hf.co/Qwen/Qwen3-0.6B-GGUF").name == "Qwen3-0.6B"
    assert resolve(registry, "Qwen/Qwen3-0.6B-GGUF:q8_0").name == "Qwen3-0.6B"
    assert resolve(registry, "Qwen/Qwen3-4B-GGUF:Q8_0").name == "Qwen3-4B-Q8_0"


def test_a_repository_that_nobody_named_is_called_by_its_name(registry: Registry) -> None:
    wanted = resolve(registry, "me/Fine-GGUF:Q4_0", labels=(" vision ", "vision"))
    assert wanted.name == "Fine-Q4_0"
    assert wanted.register
    assert wanted.labels == ("vision",)


def test_a_default_name_that_is_taken_gets_the_publisher_in_front(registry: Registry) -> None:
    assert resolve(registry, "me/Qwen3-4B-GGUF").name == "me-Qwen3-4B"
    error = refusal(registry, "https://host/Qwen3-4B.gguf")
    assert error.code == "name_taken"
    assert "built-in catalog" in error.detail


def test_a_name_for_a_checkpoint(registry: Registry) -> None:
    wanted = resolve(registry, "user.mine", checkpoint="me/Fine-GGUF:q4_0", labels=("embeddings",))
    assert (wanted.name, wanted.checkpoint, wanted.register) == ("user.mine", "me/Fine-GGUF:Q4_0", True)
    assert registry.entry_of(wanted).type == "embedding"


@pytest.mark.parametrize(
    ("model", "fields", "code"),
    [
        ("a/b", {"checkpoint": "me/x"}, "bad_name"),
        ("mine", {"checkpoint": "/models/x.gguf"}, "bad_source"),
        ("mine", {"checkpoint": "Qwen3-4B"}, "bad_source"),
        ("mine", {"checkpoint": "me/x", "recipe": "magic"}, "recipe_unknown"),
        ("Qwen3-4B", {"checkpoint": "me/x"}, "name_taken"),
        ("qwen3-4b", {"checkpoint": "me/x"}, "name_taken"),
        ("Qwen3-4B", {"recipe": "flm"}, "name_taken"),
        ("Qwen3-4B", {"labels": ("vision",)}, "name_taken"),
        ("there", {"checkpoint": "me/x"}, "name_taken"),
        ("/models/x.gguf", {}, "bad_source"),
        ("me/x", {"labels": ("a\nb",)}, "bad_labels"),
    ],
)
def test_refusals(registry: Registry, model: str, fields: dict[str, object], code: str) -> None:
    """A name belongs to one checkpoint: a collision is refused with words."""
    error = refusal(registry, model, "there", **fields)
    assert error.code == code
    assert len(error.detail) > 30


def test_the_same_name_for_the_same_place_is_that_model(registry: Registry) -> None:
    wanted = resolve(registry, "mine", checkpoint="me/Fine-GGUF:Q4_0")
    registry.add(wanted)
    assert resolve(registry, "mine", checkpoint="hf.co/me/Fine-GGUF:Q4_0") == wanted
    assert resolve(registry, "mine") == wanted
    assert resolve(registry, "me/Fine-GGUF:Q4_0") == wanted
    assert refusal(registry, "mine", checkpoint="me/Other-GGUF:Q4_0").code == "name_taken"
    assert "models rm mine" in refusal(registry, "mine", checkpoint="me/Other-GGUF:Q4_0").detail
    assert registry.forget("mine")
    assert not registry.forget("mine")
    assert refusal(registry, "mine").code == "model_not_found"


def test_other_engines_may_have_paths_and_names_of_their_own(registry: Registry) -> None:
    wanted = resolve(registry, "hears", checkpoint="/models/whisper.bin", recipe="whispercpp")
    assert is_local(wanted.checkpoint, wanted.recipe)
    assert registry.entry_of(wanted).type == "audio"
    wanted = resolve(registry, "tiny", checkpoint="llama3.2:1b", recipe="flm")
    assert is_local(wanted.checkpoint, wanted.recipe)
    assert not is_local("me/repo", "oga-cpu")
    assert not is_local("Qwen/Qwen3-4B-GGUF:Q4_K_M", "llamacpp")
    assert is_local("", "flm")


def test_a_model_that_its_engine_keeps_may_be_called_as_the_engine_calls_it(registry: Registry) -> None:
    """flm looks at the model's name in each request, which arrives as the client sent it."""
    wanted = resolve(registry, "gemma3:4b", checkpoint="gemma3:4b", recipe="flm")
    assert (wanted.name, wanted.checkpoint) == ("gemma3:4b", "gemma3:4b")
    registry.add(wanted)
    entries, problems = read_entries(json.loads(json.dumps(registry.document())))
    assert ([entry.name for entry in entries], problems) == (["gemma3:4b"], ())
    for checkpoint, recipe in (("gemma3:1b", "flm"), ("me/x:Q4_0", ""), ("/models/x", "flm")):
        assert refusal(registry, "other:4b", checkpoint=checkpoint, recipe=recipe).code == "bad_name"


def test_types() -> None:
    assert type_of(("reasoning", "Transcription")) == "audio"
    assert type_of(()) == "llm"
    assert type_of((), BUILTIN_RECIPES["sd-cpp"]) == "image"
    assert type_of(("image",), BUILTIN_RECIPES["whispercpp"]) == "image"


def test_what_is_told(registry: Registry) -> None:
    registry.add(resolve(registry, "mine", checkpoint="me/Fine-GGUF:Q4_0"))
    told = {model.name: model for model in registry.view({ModelName("mine"): 7, ModelName("else"): 9})}
    mine = told[ModelName("mine")]
    assert (mine.downloaded, mine.size_bytes, mine.user) == (True, 7, True)
    other = told[ModelName("Qwen3-4B")]
    assert (other.downloaded, other.size_bytes, other.user) == (False, 0, False)
    assert "else" not in told


def test_what_is_written_is_read() -> None:
    registry = Registry()
    registry.add(resolve(registry, "mine", checkpoint="me/Fine-GGUF:Q4_0", labels=("vision",), mmproj="mmproj.gguf"))
    registry.add(resolve(registry, "hears", checkpoint="/models/whisper.bin", recipe="whispercpp"))
    entries, problems = read_entries(json.loads(json.dumps(registry.document())))
    assert problems == ()
    assert Registry(entries).entries() == registry.entries()


@pytest.mark.parametrize("document", [None, [], {}, {"version": 1}, {"version": 2, "models": []}, {"models": []}])
def test_a_document_that_is_none_is_told(document: object) -> None:
    entries, problems = read_entries(document)
    assert entries == ()
    assert len(problems) == 1


def test_a_broken_entry_takes_no_other_with_it() -> None:
    good = {"name": "mine", "checkpoint": "me/x:Q4_0"}
    bad = [3, {"name": "x"}, {"name": "../x", "checkpoint": "a/b"}, {"name": "y", "checkpoint": "a/b", "type": "?"}]
    entries, problems = read_entries({"version": 1, "models": [*bad, good]})
    assert [entry.name for entry in entries] == ["mine"]
    assert len(problems) == len(bad)
