"""What meshd may delete of a model, and the small files the registry and the downloads are remembered in. Blocking."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from services.launcherd.download_events import Wanted
from services.launcherd.io.download_files import MARK, PARTIAL
from services.launcherd.model_catalog import Entry
from services.launcherd.registry import read_entries
from services.launcherd.slot_events import KnownModel
from shared.errors import MeshError
from shared.recipes import LLAMACPP

_PENDING = TypeAdapter(tuple[Wanted, ...])
BROKEN = ".broken"


class NotOurs(MeshError):
    """The files were not downloaded by meshd."""

    code = "not_ours"


def deletable(model: KnownModel, downloads: Path) -> list[Path]:
    """Every file of a model that meshd downloaded: its parts, its projector, or its folder.

    Raises: NotOurs for anything that is not below the downloads folder, by its name and by what it points at.
    """
    inside = downloads.resolve()
    paths = [Path(path) for path in model.file.parts]
    for path in paths:
        if not (path.parent.resolve() / path.name).is_relative_to(inside) or not path.resolve().is_relative_to(inside):
            raise NotOurs(
                f"{path} was not downloaded by meshd, so meshd does not delete it; delete the file yourself, "
                "then 'meshctl models list --rescan'"
            )
    own = downloads / model.name
    if model.recipe != LLAMACPP and paths:
        return [own] if own.is_dir() and not own.is_symlink() else paths
    beside = [own / f"mmproj-{model.name}.gguf", own / MARK] if paths and paths[0].parent == own else []
    return [*paths, *(path for path in beside if path.is_file())]


def size_of(paths: Iterable[Path]) -> int:
    """Bytes on disk of files and folders."""
    total = 0
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            for root, _, files in os.walk(path):
                total += sum(os.lstat(os.path.join(root, name)).st_size for name in files)
        elif path.exists():
            total += path.stat().st_size
    return total


def delete(paths: Iterable[Path], downloads: Path) -> int:
    """Bytes that were freed. Folders that are empty then go too. Raises: OSError."""
    chosen = list(paths)
    freed = size_of(chosen)
    for path in chosen:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
            continue
        path.unlink(missing_ok=True)
        folder = path.parent
        while folder != downloads and folder.is_relative_to(downloads) and not any(folder.iterdir()):
            folder.rmdir()
            folder = folder.parent
    return freed


def delete_partial(name: str, downloads: Path) -> int:
    """Bytes that were freed of an unfinished download. Raises: OSError."""
    folder = downloads / PARTIAL / name
    if not folder.is_dir():
        return 0
    freed = size_of([folder])
    shutil.rmtree(folder)
    return freed


# -- the two small files ---------------------------------------------------------------------------------------


def read_registry(path: Path) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """The user's entries, and in words what could not be read; a broken file is kept aside under another name."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return (), ()
    except (OSError, ValueError, RecursionError) as error:
        _keep_aside(path)
        return (), (f"{path} cannot be read: {error}; it was put aside as {path.name}{BROKEN}",)
    entries, problems = read_entries(document)
    if problems:
        _keep_aside(path)
    return entries, tuple(f"{path}: {words}; it was put aside as {path.name}{BROKEN}" for words in problems)


def write_registry(path: Path, document: object) -> None:
    """Raises: OSError."""
    _write(path, json.dumps(document, indent=1, ensure_ascii=False).encode())


def read_pending(path: Path) -> tuple[Wanted, ...]:
    """Downloads that were not finished. One that can't be read is asked for again by whoever wants it."""
    try:
        return _PENDING.validate_json(path.read_bytes())
    except FileNotFoundError:
        return ()
    except (OSError, ValidationError):
        _keep_aside(path)
        return ()


def write_pending(path: Path, pending: tuple[Wanted, ...]) -> None:
    """Raises: OSError."""
    _write(path, _PENDING.dump_json(pending))


def _keep_aside(path: Path) -> None:
    try:
        path.replace(path.with_name(path.name + BROKEN))
    except OSError:
        pass  # It stays where it is, and is written over by the next change.


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    temporary.replace(path)
