"""Models are found, joined, cached and hashed; everything else is skipped with a reason."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from services.launcherd.io import model_folders
from services.launcherd.io.model_folders import ModelFolders, ScanResult, sha256_file
from services.launcherd.model_info import FileFacts
from shared.errors import LoadFailed, ModelFileMissing
from tests.engines import tiny_models

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def names(result: ScanResult) -> list[str]:
    return [model.name for model in result.models]


def reasons(result: ScanResult) -> dict[str, str]:
    return {Path(item.path).name: item.reason for item in result.skipped}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose headers are read."""
    read: list[str] = []
    real = model_folders._read_facts

    def noted(path: Path) -> FileFacts:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(model_folders, "_read_facts", noted)
    return read


def test_each_type_is_found_and_parts_are_one_model(tiny_folder: Path) -> None:
    """TRAPS 17: model files in several parts are one model."""
    result = ModelFolders([tiny_folder]).scan()
    assert {model.name: model.type for model in result.models} == {
        "tiny-llm": "llm",
        "tiny-other": "llm",
        "tiny-parts": "llm",
        "tiny-embedding": "embedding",
        "tiny-reranking": "reranking",
    }
    assert result.skipped == ()
    whole, parts = (next(m for m in result.models if m.name == name) for name in ("tiny-llm", "tiny-parts"))
    assert [Path(part).name for part in parts.parts] == [f"tiny-parts-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert parts.parameters == whole.parameters
    assert parts.file_size_bytes == sum(os.path.getsize(part) for part in parts.parts)
    assert (parts.kv_bytes_per_token, parts.chat_template) == (whole.kv_bytes_per_token, True)
    assert whole.kv_bytes_per_token == 2 * 2 * (16 + 16) * 2


def test_broken_files_are_skipped_with_a_reason(tiny_folder: Path, tmp_path: Path) -> None:
    """TRAPS 44: a broken header, a 0-byte file: skipped with a reason."""
    data = (tiny_folder / "tiny-llm.gguf").read_bytes()
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "noise.gguf").write_bytes(os.urandom(1000))
    (tmp_path / "cut-header.gguf").write_bytes(data[:1000])
    (tmp_path / "cut-weights.gguf").write_bytes(data[:-100])
    (tmp_path / "mmproj-model.gguf").write_bytes(data)
    (tmp_path / "dangling.gguf").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "bad\nname.gguf").write_bytes(data)
    (tmp_path / "-flag.gguf").write_bytes(data)
    (tmp_path / "good.gguf").write_bytes(data)
    (tmp_path / "notes.txt").write_bytes(data)
    (tmp_path / "loading.gguf.part").write_bytes(data)
    result = ModelFolders([tmp_path]).scan()
    assert names(result) == ["good"]
    found = reasons(result)
    assert set(found) == {
        "empty.gguf", "noise.gguf", "cut-header.gguf", "cut-weights.gguf", "mmproj-model.gguf", "dangling.gguf",
        "pipe.gguf", "bad\\nname.gguf", "-flag.gguf",
    }  # fmt: skip
    assert "empty" in found["empty.gguf"]
    assert "not a GGUF" in found["noise.gguf"]
    assert "truncated" in found["cut-header.gguf"]
    assert "truncated" in found["cut-weights.gguf"]
    assert "projector" in found["mmproj-model.gguf"]
    assert "leads nowhere" in found["dangling.gguf"]
    assert "regular" in found["pipe.gguf"]


def test_a_name_that_is_not_utf8_is_skipped(tiny_folder: Path, tmp_path: Path) -> None:
    bad = os.fsencode(tmp_path) + b"/bad\xff.gguf"
    Path(os.fsdecode(bad)).write_bytes((tiny_folder / "tiny-llm.gguf").read_bytes())
    (skipped,) = ModelFolders([tmp_path]).scan().skipped
    assert skipped.path.endswith("bad\\xff.gguf")
    json.dumps(skipped.path).encode()


def test_a_link_loop_ends(tiny_folder: Path, tmp_path: Path) -> None:
    """TRAPS 44: a link loop in the models folder."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "loop").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    shutil.copy(tiny_folder / "tiny-llm.gguf", inner / "deep.gguf")
    result = ModelFolders([tmp_path]).scan()
    assert names(result) == ["deep"]
    assert result.models[0].path == str(inner / "deep.gguf")
    assert result.skipped == ()


def test_missing_parts_are_named(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_folder / "tiny-parts-00002-of-00003.gguf", tmp_path)
    (skipped,) = ModelFolders([tmp_path]).scan().skipped
    assert skipped.reason == "parts missing: 1, 3 of 3"


def test_a_renamed_part_and_parts_of_another_model_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_folder / "tiny-parts-00001-of-00003.gguf", tmp_path / "renamed.gguf")
    for number in (1, 2):
        shutil.copy(tiny_folder / "tiny-parts-00001-of-00003.gguf", tmp_path / f"odd-0000{number}-of-00002.gguf")
    result = ModelFolders([tmp_path]).scan()
    assert names(result) == []
    assert "part 1 of 3" in reasons(result)["renamed.gguf"]
    assert "part 1 of 3" in reasons(result)["odd-00001-of-00002.gguf"]


def test_of_two_files_with_one_name_the_first_folder_wins(tiny_folder: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "z", tmp_path / "a"]
    for folder in folders:
        folder.mkdir()
        shutil.copy(tiny_folder / "tiny-llm.gguf", folder)
    result = ModelFolders(folders).scan()
    assert [model.path for model in result.models] == [str(folders[0] / "tiny-llm.gguf")]
    assert result.skipped[0].path == str(folders[1] / "tiny-llm.gguf")
    assert str(folders[0]) in result.skipped[0].reason


def test_a_broken_first_does_not_hide_a_good_second(tiny_folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "tiny-llm.gguf").write_bytes(b"GGUF")
    shutil.copy(tiny_folder / "tiny-llm.gguf", tmp_path / "b")
    result = ModelFolders([tmp_path / "a", tmp_path / "b"]).scan()
    assert [model.path for model in result.models] == [str(tmp_path / "b" / "tiny-llm.gguf")]


def test_folders_may_be_missing_or_single_files(tiny_folder: Path, tmp_path: Path) -> None:
    result = ModelFolders([tmp_path / "none", tiny_folder / "tiny-llm.gguf"]).scan()
    assert names(result) == ["tiny-llm"]
    assert "does not exist" in reasons(result)["none"]


def test_a_folder_that_nobody_named_may_be_missing_without_a_word(tiny_folder: Path, tmp_path: Path) -> None:
    folders = ModelFolders([tmp_path / "none", tiny_folder], may_be_missing=[tmp_path / "none"])
    assert folders.scan().skipped == ModelFolders([tiny_folder]).scan().skipped


def test_a_second_scan_reads_nothing_and_a_changed_file_is_read_again(
    tiny_folder: Path, tmp_path: Path, parsed: list[str]
) -> None:
    shutil.copy(tiny_folder / "tiny-llm.gguf", tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"broken")
    cache = tmp_path / "cache.json"
    first = ModelFolders([tmp_path], cache).scan()
    assert sorted(parsed) == ["a.gguf", "b.gguf"]
    parsed.clear()
    assert ModelFolders([tmp_path], cache).scan() == first
    assert parsed == []
    tiny_models.write_embedding(tmp_path / "a.gguf")
    assert ModelFolders([tmp_path], cache).scan().models[0].type == "embedding"
    assert parsed == ["a.gguf"]
    (tmp_path / "a.gguf").unlink()
    ModelFolders([tmp_path], cache).scan()
    assert str(tmp_path / "a.gguf") not in cache.read_text()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "",
        lambda text: text.replace('"version": 1', '"version": 99'),
        lambda text: text.replace('"llama"', "7"),
        lambda text: text.replace('"parameters":', '"size_of_it":'),
        lambda text: "[" * 100_000,
    ],
)
def test_a_spoilt_cache_is_ignored(tiny_folder: Path, tmp_path: Path, spoil: Callable[[str], str]) -> None:
    cache = tmp_path / "cache.json"
    first = ModelFolders([tiny_folder], cache).scan()
    spoilt = spoil(cache.read_text())
    cache.write_text(spoilt)
    assert ModelFolders([tiny_folder], cache).scan() == first
    assert cache.read_text() != spoilt


def test_a_cache_that_cannot_be_written_is_no_error(tiny_folder: Path, tmp_path: Path) -> None:
    assert len(ModelFolders([tiny_folder], tmp_path / "missing" / "cache.json").scan().models) == 5


def test_hashes_are_right_cached_and_known_after_a_restart(tiny_folder: Path, tmp_path: Path, run: Run) -> None:
    cache = tmp_path / "cache.json"
    folders = ModelFolders([tiny_folder], cache)
    models = {model.name: model for model in folders.scan().models}
    one, parts = models["tiny-llm"], models["tiny-parts"]
    assert folders.known_hash(one) == ""
    progress: list[int] = []
    assert run(folders.hash_model(one, progress.append)) == hashlib.sha256(Path(one.path).read_bytes()).hexdigest()
    assert progress[-1] == one.file_size_bytes
    of_parts = run(folders.hash_parts(parts, progress.append))
    assert of_parts == tuple(hashlib.sha256(Path(part).read_bytes()).hexdigest() for part in parts.parts)
    assert progress[-1] == parts.file_size_bytes
    again = ModelFolders([tiny_folder], cache)
    again.scan()
    assert again.known_hash(one) == run(folders.hash_model(one))
    assert again.known_hash(parts) == run(again.hash_model(parts)) != ""


def test_a_changed_file_loses_its_hash(tiny_folder: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(tiny_folder / "tiny-llm.gguf", path)
    folders = ModelFolders([tmp_path])
    old = run(folders.hash_model(folders.scan().models[0]))
    tiny_models.write_llm(path, seed=9)
    model = folders.scan().models[0]
    assert folders.known_hash(model) == ""
    assert run(folders.hash_model(model)) != old


def test_hashing_before_scanning_does_not_lose_the_hash(tiny_folder: Path, tmp_path: Path, run: Run) -> None:
    cache = tmp_path / "cache.json"
    model = ModelFolders([tiny_folder]).scan().models[0]
    known = run(ModelFolders([tiny_folder], cache).hash_model(model))
    again = ModelFolders([tiny_folder], cache)
    again.scan()
    assert again.known_hash(model) == known


def test_hashing_a_file_that_is_gone_says_so(tiny_folder: Path, tmp_path: Path, run: Run) -> None:
    """TRAPS 23: decided by type."""
    path = tmp_path / "m.gguf"
    shutil.copy(tiny_folder / "tiny-llm.gguf", path)
    folders = ModelFolders([tmp_path])
    model = folders.scan().models[0]
    path.unlink()
    with pytest.raises(ModelFileMissing):
        run(folders.hash_model(model))


def test_cancelling_stops_the_worker_thread(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    tiny_models.write_llm(path)
    folders = ModelFolders([tmp_path])
    model = folders.scan().models[0]
    monkeypatch.setattr(model_folders, "HASH_CHUNK_BYTES", 4096)
    reached, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
    chunks: list[int] = []

    def progress(done: int) -> None:
        chunks.append(done)
        reached.set()
        goes_on.wait(10)

    real = model_folders.sha256_file

    def hash_and_tell(*arguments: Any) -> str:
        try:
            return real(*arguments)
        finally:
            ended.set()

    monkeypatch.setattr(model_folders, "sha256_file", hash_and_tell)

    async def cancel_midway() -> None:
        task = asyncio.get_running_loop().create_task(folders.hash_model(model, progress))
        await asyncio.to_thread(reached.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        goes_on.set()
        await asyncio.to_thread(ended.wait, 10)

    run(cancel_midway())
    assert len(chunks) == 1
    assert folders.known_hash(model) == ""


def test_a_stopped_hash_is_an_error_not_a_wrong_hash(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    (tmp_path / "f").write_bytes(b"x")
    with pytest.raises(LoadFailed):
        sha256_file(str(tmp_path / "f"), stop)


def test_a_downloaded_files_hash_is_known_until_it_changes(tmp_path: Path) -> None:
    """What a file was verified against is its hash in the inventory from then on, until the file changes."""
    path = tiny_models.write_llm(tmp_path / "mine.gguf")
    (tmp_path / ".download.json").write_text(json.dumps({"mine.gguf": "ab" * 32}))
    folders = ModelFolders([tmp_path])
    [model] = folders.scan().models
    assert folders.known_hash(model) == "ab" * 32
    later = path.stat().st_mtime_ns + 10_000_000_000
    os.utime(path, ns=(later, later))
    [model] = folders.scan().models
    assert folders.known_hash(model) == ""
    for nonsense in ("[]", "{", '{"mine.gguf": 3}', '{"mine.gguf": "url-ab"}'):
        (tmp_path / ".download.json").write_text(nonsense)
        os.utime(tmp_path / ".download.json", ns=(2 * later, 2 * later))
        again = ModelFolders([tmp_path])
        assert again.known_hash(again.scan().models[0]) == ""
