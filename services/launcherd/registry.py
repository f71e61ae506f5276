"""The models a node can get or has: the built-in catalog and what its user registered.

A registry has no clock and no files: it is read from a document, and gives one to write. What is on disk is told to it.

Source: docs/spec/registry.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from services.launcherd.download_events import Wanted
from services.launcherd.model_catalog import CATALOG, Entry
from services.launcherd.model_source import (
    HubSource,
    PathSource,
    RegistryName,
    Source,
    SourceRefused,
    UrlSource,
    check_name,
    checkpoint_of,
    default_name,
    parse_source,
)
from shared.ids import ModelName
from shared.messages.downloads import PullModel, RegisteredModel
from shared.messages.models import ModelType
from shared.recipes import BUILTIN_RECIPES, LLAMACPP, Recipe

VERSION = 1
LABEL_TYPES: Mapping[str, ModelType] = {
    "embedding": "embedding",
    "embeddings": "embedding",
    "reranking": "reranking",
    "audio": "audio",
    "transcription": "audio",
    "image": "image",
}
LABELS_LIMIT = 32

_ENTRY = TypeAdapter(Entry)


class Registry:
    """`user` entries win over the catalog's; they never share a name, which `resolve` sees to."""

    def __init__(self, user: Iterable[Entry] = (), recipes: Mapping[str, Recipe] = BUILTIN_RECIPES) -> None:
        self.recipes = recipes
        self._user = {entry.name: replace(entry, user=True) for entry in user}

    def entries(self) -> tuple[Entry, ...]:
        """All of them, by name."""
        known = {entry.name: entry for entry in CATALOG} | self._user
        return tuple(sorted(known.values(), key=lambda entry: entry.name.lower()))

    def find(self, name: str) -> Entry | None:
        """The entry of that name, whatever the case of its letters."""
        entries = self.entries()
        exact = next((entry for entry in entries if entry.name == name), None)
        return exact or next((entry for entry in entries if entry.name.lower() == name.lower()), None)

    def add(self, wanted: Wanted) -> Entry:
        """Register what is on this node now."""
        entry = self.entry_of(wanted)
        self._user[entry.name] = entry
        return entry

    def forget(self, name: str) -> bool:
        """Whether there was such an entry of the user's."""
        return self._user.pop(ModelName(name), None) is not None

    def entry_of(self, wanted: Wanted) -> Entry:
        return Entry(
            name=wanted.name,
            checkpoint=wanted.checkpoint,
            recipe=wanted.recipe,
            type=type_of(wanted.labels, self.recipes.get(wanted.recipe)),
            labels=wanted.labels,
            mmproj=wanted.mmproj,
            user=True,
        )

    def view(self, on_disk: Mapping[ModelName, int]) -> tuple[RegisteredModel, ...]:
        """For everybody. `on_disk` is the inventory: name -> size in bytes."""
        return tuple(
            RegisteredModel(
                name=entry.name,
                checkpoint=entry.checkpoint,
                recipe=entry.recipe,
                type=entry.type,
                labels=entry.labels,
                size_bytes=on_disk.get(entry.name, 0),
                downloaded=entry.name in on_disk,
                user=entry.user,
            )
            for entry in self.entries()
        )

    # -- what a request means ----------------------------------------------------------------------------------

    def resolve(self, request: PullModel, on_disk: Collection[ModelName] = ()) -> Wanted:
        """Which model a request is about, and what has to be fetched for it.

        Raises: SourceRefused (`bad_source`, `bad_name`, `name_taken`, `model_not_found`, `recipe_unknown`).
        """
        if request.recipe and request.recipe not in self.recipes:
            raise SourceRefused(
                "recipe_unknown", f"no recipe {request.recipe!r} on this node; known: {', '.join(self.recipes)}"
            )
        labels = _labels(request.labels)
        if request.checkpoint:
            return self._named(request, labels, on_disk)
        match parse_source(request.model):
            case RegistryName(name=name):
                return self._known(name, request, labels)
            case PathSource():
                raise SourceRefused(
                    "bad_source",
                    f"{request.model!r} is a path: what is here already is not fetched. For another engine than "
                    "llama.cpp register it: 'meshctl pull PATH --name NAME --recipe RECIPE'",
                )
            case (HubSource() | UrlSource()) as source:
                return self._unnamed(source, request, labels)

    def _known(self, name: str, request: PullModel, labels: tuple[str, ...]) -> Wanted:
        entry = self.find(name)
        if entry is None:
            close = difflib.get_close_matches(name, [entry.name for entry in self.entries()], n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}" if close else "'meshctl models list --all' shows the names"
            raise SourceRefused(
                "model_not_found",
                f"the registry knows no model {name[:200]!r}; {hint}. A repository is written org/repo:quantisation",
            )
        if (request.recipe or entry.recipe) != entry.recipe or (labels and labels != entry.labels):
            raise _taken(entry, "with another recipe or other labels")
        return _wanted(entry, request.mmproj)

    def _named(self, request: PullModel, labels: tuple[str, ...], on_disk: Collection[ModelName]) -> Wanted:
        recipe = request.recipe or LLAMACPP
        _check_name(request.model, request.checkpoint, recipe)
        source = parse_source(request.checkpoint)
        if recipe == LLAMACPP and not isinstance(source, HubSource | UrlSource):
            raise SourceRefused(
                "bad_source",
                f"{request.checkpoint!r} is no repository and no URL; a .gguf file that is here already needs no "
                "registration: put its folder into models.folders ('meshctl up --models-dir FOLDER')",
            )
        wanted = Wanted(
            name=ModelName(request.model),
            checkpoint=checkpoint_of(source),
            recipe=recipe,
            labels=labels,
            mmproj=request.mmproj,
            register=True,
        )
        entry = self.find(request.model)
        if entry is None:
            if request.model in on_disk:
                raise SourceRefused(
                    "name_taken", f"a file on this node is called {request.model} already; choose another name"
                )
            return wanted
        if _same_place(entry, source) and entry.recipe == recipe and (not labels or labels == entry.labels):
            return _wanted(entry, request.mmproj)
        raise _taken(entry, f"for {entry.checkpoint}")

    def _unnamed(self, source: HubSource | UrlSource, request: PullModel, labels: tuple[str, ...]) -> Wanted:
        recipe = request.recipe or LLAMACPP
        for entry in self.entries():
            if _same_place(entry, source) and entry.recipe == recipe and (not labels or labels == entry.labels):
                return _wanted(entry, request.mmproj)
        wanted = Wanted(
            name=ModelName(default_name(source)),
            checkpoint=checkpoint_of(source),
            recipe=recipe,
            labels=labels,
            mmproj=request.mmproj,
            register=True,
        )
        other = self.find(wanted.name)
        if other is None:
            return wanted
        if isinstance(source, HubSource):
            longer = ModelName(f"{source.repo.partition('/')[0]}-{wanted.name}")
            if self.find(longer) is None:
                return replace(wanted, name=longer)
        raise _taken(other, f"for {other.checkpoint}")

    # -- the document ------------------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """What is written down: the user's entries."""
        entries = [
            {
                "name": entry.name,
                "checkpoint": entry.checkpoint,
                "recipe": entry.recipe,
                "type": entry.type,
                "labels": list(entry.labels),
                "mmproj": entry.mmproj,
            }
            for entry in self._user.values()
        ]
        return {"version": VERSION, "models": sorted(entries, key=lambda item: str(item["name"]))}


def read_entries(document: object) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """The user's entries of a document, and in words what of it can't be used."""
    if not isinstance(document, dict) or not isinstance(document.get("models"), list):
        return (), ("it is no list of models",)
    if document.get("version") != VERSION:
        return (), (f"it is of version {document.get('version')!r}, this meshd reads {VERSION}",)
    entries: dict[ModelName, Entry] = {}
    problems = []
    for item in document["models"]:
        try:
            entry = _ENTRY.validate_python(item)
            _check_name(entry.name, entry.checkpoint, entry.recipe)
        except (ValidationError, SourceRefused) as error:
            what = item.get("name", "?") if isinstance(item, dict) else item
            why = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error.detail
            problems.append(f"entry {str(what)[:80]!r}: {why}")
            continue
        entries[entry.name] = replace(entry, user=True)
    return tuple(entries.values()), tuple(problems)


def type_of(labels: Iterable[str], recipe: Recipe | None = None) -> ModelType:
    """By the labels; without any that says, what the recipe serves first, else llm."""
    for label in labels:
        if label.lower() in LABEL_TYPES:
            return LABEL_TYPES[label.lower()]
    served = recipe.types if recipe is not None else ()
    return "llm" if not served or "llm" in served else served[0]


def is_local(checkpoint: str, recipe: str) -> bool:
    """Whether there is nothing to fetch: a path, or a name that another engine keeps its models by."""
    if recipe == LLAMACPP:
        return False
    try:
        return isinstance(parse_source(checkpoint), PathSource | RegistryName)
    except SourceRefused:
        return True


def _check_name(name: str, checkpoint: str, recipe: str) -> None:
    """A model that another engine keeps may be called as that engine calls it, which may have a colon: requests for it
    arrive with this name. Raises: SourceRefused.
    """
    kept_by_engine = name == checkpoint and recipe != LLAMACPP and isinstance(parse_source(checkpoint), RegistryName)
    check_name(name.replace(":", "-") if kept_by_engine else name)


def _labels(labels: tuple[str, ...]) -> tuple[str, ...]:
    cleaned = tuple(dict.fromkeys(label.strip() for label in labels if label.strip()))
    if len(cleaned) > LABELS_LIMIT or any(len(label) > 64 or not label.isprintable() for label in cleaned):
        raise SourceRefused("bad_labels", f"up to {LABELS_LIMIT} labels of up to 64 printable characters")
    return cleaned


def _wanted(entry: Entry, mmproj: str = "") -> Wanted:
    return Wanted(
        name=entry.name,
        checkpoint=entry.checkpoint,
        recipe=entry.recipe,
        labels=entry.labels,
        mmproj=mmproj or entry.mmproj,
        register=entry.user,
    )


def _same_place(entry: Entry, source: Source) -> bool:
    """The same files; a repository without a quantisation is the one that the entry chose of it."""
    try:
        known = parse_source(entry.checkpoint)
    except SourceRefused:
        return False
    if known == source:
        return True
    if not isinstance(known, HubSource) or not isinstance(source, HubSource):
        return False
    return known.repo == source.repo and not source.quantization and not source.file


def _taken(entry: Entry, how: str) -> SourceRefused:
    whose = "you registered" if entry.user else "the built-in catalog has"
    return SourceRefused(
        "name_taken",
        f"{whose} {entry.name} {how}; choose another name"
        + (f", or 'meshctl models rm {entry.name}' first" if entry.user else ""),
    )
