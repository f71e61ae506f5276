"""What people write, and which files of a repository that means. Rules: docs/spec/downloads.md."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launcherd.model_source import (
    ChosenFile,
    HubSource,
    PathSource,
    RegistryName,
    SourceRefused,
    UrlSource,
    check_name,
    checkpoint_of,
    choose_files,
    default_name,
    parse_source,
    quantization_of,
)

HUB = "https://huggingface.co"


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("Qwen3-0.6B", RegistryName("Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B-GGUF", HubSource("Qwen/Qwen3-0.6B-GGUF")),
        ("Qwen/Qwen3-0.6B-GGUF:q8_0", HubSource("Qwen/Qwen3-0.6B-GGUF", "Q8_0")),
        ("hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0", HubSource("Qwen/Qwen3-0.6B-GGUF", "Q8_0")),
        ("HF.co/Qwen/Qwen3-0.6B-GGUF", HubSource("Qwen/Qwen3-0.6B-GGUF")),
        (f"{HUB}/a/b", HubSource("a/b")),
        ("a/b:", HubSource("a/b")),
        (f"{HUB}/a/b/tree/main", HubSource("a/b")),
        ("a/b:sub/x-Q4_0.gguf", HubSource("a/b", file="sub/x-Q4_0.gguf")),
        (f"{HUB}/a/b/resolve/main/x%20y.gguf?download=true", HubSource("a/b", file="x y.gguf")),
        (f"{HUB}/a/b/blob/v1/sub/x.gguf", HubSource("a/b", file="sub/x.gguf", revision="v1")),
        ("http://127.0.0.1:8000/d/x.gguf", UrlSource("http://127.0.0.1:8000/d/x.gguf")),
        ("https://host/x.GGUF?token=1#part", UrlSource("https://host/x.GGUF?token=1")),
        ("/models/x.gguf", PathSource("/models/x.gguf")),
        ("~/whisper", PathSource("~/whisper")),
    ],
)
def test_sources(text: str, source: object) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "a\nb",
        "a/b/c",
        "/".join(["a"] * 4),
        "a/../b",
        "a/b:../../etc/x.gguf",
        "hf.co/x",
        "a/b:sub/../x.gguf",
        f"{HUB}/a/b/resolve/main",
        f"{HUB}/a/b/resolve/main/%2e%2e/x.gguf",
        f"{HUB}/a/b/tree/other",
        f"{HUB}/a",
        "https://host/model.bin",
        "https://user:secret@host/x.gguf",
        "https:///x.gguf",
        "http://[::1/x.gguf",
        "-a/b",
        "a/b:Q4 K",
        "x" * 3000,
    ],
)
def test_what_names_no_model_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(SourceRefused) as refused:
        parse_source(text)
    assert refused.value.code == "bad_source"
    assert "org/repo:quantisation" in refused.value.detail
    assert "secret@" not in refused.value.detail.partition(": a URL")[2]


@given(st.text(max_size=80) | st.from_regex(r"(https://huggingface\.co/|hf\.co/|)[\w.:/%-]{0,60}", fullmatch=True))
def test_any_text_is_a_source_with_one_spelling_or_refused(text: str) -> None:
    try:
        source = parse_source(text)
    except SourceRefused:
        return
    assert parse_source(checkpoint_of(source)) == source
    if isinstance(source, HubSource | UrlSource):
        check_name(default_name(source))
    if isinstance(source, HubSource):
        assert ".." not in source.repo
        assert ".." not in source.file.split("/")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B-GGUF:Q8_0", "Qwen3-0.6B-Q8_0"),
        ("Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B"),
        ("a/b:sub/x y-Q4_0.gguf", "x-y-Q4_0"),
        ("a/b:m-00001-of-00003.gguf", "m"),
        ("https://host/dir/My%20Model.gguf", "My-Model"),
    ],
)
def test_names(text: str, name: str) -> None:
    source = parse_source(text)
    assert isinstance(source, HubSource | UrlSource)
    assert default_name(source) == name


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a/b", "..", "a b", "x.gguf", "x.partial", "x" * 97, "é"])
def test_a_name_that_is_no_folder_name_is_refused(name: str) -> None:
    with pytest.raises(SourceRefused) as refused:
        check_name(name)
    assert refused.value.code == "bad_name"


@pytest.mark.parametrize(
    ("file", "quantization"),
    [
        ("Qwen3-0.6B-Q8_0.gguf", "Q8_0"),
        ("qwen2.5-coder-7b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("nomic-embed-text-v1.5.Q4_K_M.gguf", "Q4_K_M"),
        ("tiny_Q4_K_M.gguf", "Q4_K_M"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("Q2_K/model-00001-of-00002.gguf", "Q2_K"),
        ("model-IQ3_XXS.gguf", "IQ3_XXS"),
        ("model-f16.gguf", "F16"),
        ("model-BF16-00001-of-00002.gguf", "BF16"),
        ("Q4-Model.gguf", "Q4"),
        ("model.gguf", ""),
        ("Q4_K_MODEL.gguf", ""),
    ],
)
def test_the_quantisation_in_a_name(file: str, quantization: str) -> None:
    assert quantization_of(file) == quantization


REPO = [
    ".gitattributes",
    "README.md",
    "M-Q4_K_M.gguf",
    "M-Q4_K_S.gguf",
    "M-Q8_0-00001-of-00002.gguf",
    "M-Q8_0-00002-of-00002.gguf",
    "mmproj-M-f16.gguf",
    "M.imatrix.gguf",
]


def chosen(files: list[str], text: str, **options: object) -> list[ChosenFile]:
    source = parse_source(text)
    assert isinstance(source, HubSource)
    return list(choose_files(files, source, "name", **options))  # type: ignore[arg-type]


def refused(files: list[str], text: str, **options: object) -> SourceRefused:
    with pytest.raises(SourceRefused) as error:
        chosen(files, text, **options)
    return error.value


def test_a_quantisation_is_the_whole_token() -> None:
    """A quantisation is matched against the whole token of a file's name, without regard to case." """
    assert chosen(REPO, "a/b:q4_k_m") == [ChosenFile("M-Q4_K_M.gguf", "name.gguf")]
    error = refused(REPO, "a/b:Q4_K")
    assert error.code == "quantization_not_found"
    assert "Q4_K_M, Q4_K_S, Q8_0" in error.detail


def test_parts_come_all_together() -> None:
    """Parts of one model come all together, in order; a repository that lacks one is refused." (TRAPS 17)"""
    parts = [
        ChosenFile("M-Q8_0-00001-of-00002.gguf", "name-00001-of-00002.gguf"),
        ChosenFile("M-Q8_0-00002-of-00002.gguf", "name-00002-of-00002.gguf"),
    ]
    assert chosen(list(reversed(REPO)), "a/b:Q8_0") == parts
    assert chosen(REPO, "a/b:M-Q8_0-00002-of-00002.gguf") == parts
    error = refused([file for file in REPO if "00001" not in file], "a/b:Q8_0")
    assert error.code == "incomplete"
    assert "part 1 of the 2" in error.detail


def test_without_a_quantisation_the_preferred_one_is_taken() -> None:
    """When none is named, Q4_K_M is taken, else the first of a fixed order." """
    assert chosen(REPO, "a/b")[0].remote == "M-Q4_K_M.gguf"
    assert chosen(["M-Q2_K.gguf", "M-Q8_0.gguf"], "a/b")[0].remote == "M-Q8_0.gguf"
    assert chosen(["x-mxfp4.gguf", "x-F16.gguf"], "a/b")[0].remote == "x-mxfp4.gguf"
    assert chosen(["only.gguf"], "a/b")[0].remote == "only.gguf"


def test_two_models_of_one_quantisation_are_ambiguous() -> None:
    error = refused(["A-Q4_K_M.gguf", "B-Q4_K_M.gguf"], "a/b:Q4_K_M")
    assert error.code == "ambiguous"
    assert "A-Q4_K_M" in error.detail
    assert "a/b:A-Q4_K_M.gguf" in error.detail


def test_a_model_that_is_there_whole_and_in_parts_comes_whole() -> None:
    files = ["m-q4_k_m-00001-of-00002.gguf", "m-q4_k_m-00002-of-00002.gguf", "m-q4_k_m.gguf"]
    assert [file.remote for file in chosen(files, "a/b:Q4_K_M")] == ["m-q4_k_m.gguf"]


def test_dynamic_quantisations_answer_to_their_plain_name_unless_there_is_one() -> None:
    assert chosen(["M-UD-Q4_K_XL.gguf"], "a/b:Q4_K_XL")[0].remote == "M-UD-Q4_K_XL.gguf"
    assert chosen(["M-UD-Q2_K.gguf", "M-Q2_K.gguf"], "a/b:Q2_K")[0].remote == "M-Q2_K.gguf"
    assert chosen(["M-UD-Q2_K.gguf", "M-Q2_K.gguf"], "a/b:UD-Q2_K")[0].remote == "M-UD-Q2_K.gguf"


def test_a_projector_is_never_the_model_and_comes_when_asked_for() -> None:
    """A projector is never the model; it is fetched beside it when it is asked for." """
    assert refused(["mmproj-M-f16.gguf"], "a/b").code == "no_gguf"
    files = chosen(REPO, "a/b:Q4_K_M", mmproj="mmproj-M-f16.gguf")
    assert files[1] == ChosenFile("mmproj-M-f16.gguf", "mmproj-name.gguf")
    assert refused(REPO, "a/b:Q4_K_M", mmproj="other.gguf").code == "file_not_found"


def test_files_by_name() -> None:
    assert chosen(["d/M-Q4_0.gguf"], "a/b:M-Q4_0.gguf")[0].remote == "d/M-Q4_0.gguf"
    assert refused(REPO, "a/b:other.gguf").code == "file_not_found"
    assert refused(["README.md"], "a/b").code == "no_gguf"


def test_other_engines_get_a_file_or_the_whole_repository() -> None:
    files = [".gitattributes", "config.json", "sub/model.onnx"]
    assert chosen(files, "a/b", whole=True) == [
        ChosenFile("config.json", "config.json"),
        ChosenFile("sub/model.onnx", "sub/model.onnx"),
    ]
    assert chosen(files, "a/b:model.onnx", whole=True) == [ChosenFile("sub/model.onnx", "model.onnx")]
    assert refused(files, "a/b:Q4_0", whole=True).code == "bad_source"
    assert refused([".gitattributes"], "a/b", whole=True).code == "file_not_found"
