"""Where a model comes from: what people write, taken apart, and which files of a repository that means.

    NAME                                         a name of the registry
    org/repo   org/repo:Q4_K_M   org/repo:file   a repository of the hub; `hf.co/…` and `https://huggingface.co/…` too
    https://host/…/file.gguf                     any other place that serves one file
    /path   ~/path                               what is on this disk already

Source: docs/spec/downloads.md 1-9; TRAPS 17.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from services.launcherd.model_info import split_part_name
from shared.errors import MeshError

HUB_HOSTS = frozenset({"huggingface.co", "www.huggingface.co", "hf.co"})
QUANTIZATIONS = (
    "Q4_K_M", "MXFP4", "MXFP4_MOE", "UD-Q4_K_XL", "Q4_K_S", "Q4_0", "IQ4_XS", "IQ4_NL", "Q5_K_M", "UD-Q5_K_XL",
    "Q5_K_S", "Q6_K", "Q8_0", "Q3_K_L", "Q3_K_M", "Q4_1", "Q5_0", "Q5_1", "Q3_K_S", "IQ3_M", "Q2_K", "BF16", "F16",
    "F32",
)  # fmt: skip
"""Which one is taken when none is named, best first; any other comes after these by its name."""
NAME_LIMIT = 96
"""Names become file and folder names."""
SHOWN = 12

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_QUANT = re.compile(
    r"(?:^|[-._/])(?P<quant>(?:UD-)?(?:I?Q\d(?:_(?:K_XL|K_XXL|K_[SML]|K|XXS|XS|NL|[SML]|\d))?|TQ\d_\d|"
    r"BF16|FP16|FP32|F16|F32|MXFP4(?:_MOE)?))(?=$|[-./])",
    re.IGNORECASE,
)
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,30}")


class SourceRefused(MeshError):
    """What was written names no model that can be fetched; `code` tells which way."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


@dataclass(frozen=True, slots=True)
class HubSource:
    """Files of a repository: the one `file`, else those of `quantization`, else of the best one there is."""

    repo: str
    quantization: str = ""
    file: str = ""
    revision: str = ""


@dataclass(frozen=True, slots=True)
class UrlSource:
    url: str


@dataclass(frozen=True, slots=True)
class RegistryName:
    name: str


@dataclass(frozen=True, slots=True)
class PathSource:
    path: str


Source = HubSource | UrlSource | RegistryName | PathSource


@dataclass(frozen=True, slots=True)
class ChosenFile:
    """A file to fetch, and its name below the model's own folder."""

    remote: str
    local: str


def parse_source(text: str) -> Source:
    """Raises: SourceRefused (`bad_source`)."""
    given = text.strip()
    if not given or not given.isprintable() or len(given) > 2_000:
        raise _bad(text, "it is empty, too long, or has unprintable characters")
    if given.startswith(("/", "~")):
        return PathSource(given)
    if given.lower().startswith(("http://", "https://")):
        return _parse_url(given)
    for host in HUB_HOSTS:
        if given.lower().startswith(f"{host}/"):
            given = given[len(host) + 1 :]
            if "/" not in given:
                raise _bad(text, "a repository is written org/name")
    if "/" in given:
        repo, _, tag = given.partition(":")
        return _parse_hub(repo.rstrip("/").split("/"), tag, text)
    return RegistryName(given)


def checkpoint_of(source: Source) -> str:
    """The one spelling of a source: `parse_source(checkpoint_of(source)) == source`."""
    match source:
        case HubSource(repo=repo, file=file, revision=revision) if file and (revision or not re.search("[./]", file)):
            return f"https://huggingface.co/{repo}/resolve/{quote(revision or 'main', safe='')}/{quote(file)}"
        case HubSource(repo=repo, quantization=quantization, file=file):
            return f"{repo}:{file or quantization}".rstrip(":")
        case UrlSource(url=url):
            return url
        case RegistryName(name=name):
            return name
        case PathSource(path=path):
            return path


def default_name(source: HubSource | UrlSource) -> str:
    """What a model is called when nobody named it: as its file, or as the repository and the quantisation."""
    match source:
        case HubSource(file="", repo=repo, quantization=quantization):
            base = re.sub(r"[-_.]gguf$", "", repo.rpartition("/")[2], flags=re.IGNORECASE)
            stem = f"{base}-{quantization}" if quantization else base
        case HubSource(file=file):
            stem = _stem(file)
        case UrlSource(url=url):
            stem = _stem(unquote(urlsplit(url).path))
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-")[:NAME_LIMIT]
    return cleaned or "model"


def check_name(name: str) -> None:
    """A model's name becomes a folder. Raises: SourceRefused (`bad_name`)."""
    if len(name) > NAME_LIMIT or _NAME.fullmatch(name) is None or name.lower().endswith((".gguf", ".partial")):
        raise SourceRefused(
            "bad_name",
            f"{name[:200]!r} cannot be a model's name: use up to {NAME_LIMIT} letters, digits, '.', '_', '-', "
            "beginning with a letter or digit",
        )


def quantization_of(file: str) -> str:
    """The quantisation in a file's name, else in its folder's, in upper case; empty if there is none."""
    stem = _stem(file)
    found = [match["quant"].upper() for match in _QUANT.finditer(stem)]
    if not found and "/" in file:
        found = [match["quant"].upper() for match in _QUANT.finditer(file.rpartition("/")[0])]
    return found[-1] if found else ""


def choose_files(
    files: Sequence[str], source: HubSource, name: str, *, whole: bool = False, mmproj: str = ""
) -> tuple[ChosenFile, ...]:
    """The repository's files that make up the model, parts in order, its projector last.

    With `whole` (an engine other than llama.cpp) the named file, or the entire repository.
    Raises: SourceRefused (`file_not_found`, `quantization_not_found`, `ambiguous`, `incomplete`, `no_gguf`).
    """
    if whole:
        return _whole(files, source)
    ggufs = [file for file in files if is_model_file(file)]
    if source.file:
        chosen = _with_parts(_named(files, source.file, source.repo), ggufs, source.repo)
    else:
        if not ggufs:
            raise SourceRefused(
                "no_gguf",
                f"{source.repo} has no GGUF file; look for a repository of the same model whose name ends in -GGUF",
            )
        chosen = _of_quantization(ggufs, source)
    if len(chosen) == 1:
        result = [ChosenFile(chosen[0], f"{name}.gguf")]
    else:
        total = len(chosen)
        result = [ChosenFile(file, f"{name}-{at:05}-of-{total:05}.gguf") for at, file in enumerate(chosen, 1)]
    if mmproj:
        result.append(ChosenFile(_named(files, mmproj, source.repo), f"mmproj-{name}.gguf"))
    return tuple(result)


def is_model_file(file: str) -> bool:
    """Whether a repository's file can be a model: projectors and importance matrices are not."""
    base = file.rpartition("/")[2].lower()
    return base.endswith(".gguf") and "mmproj" not in base and "imatrix" not in base


def _parse_url(given: str) -> Source:
    try:
        parts = urlsplit(given)
        host, _ = (parts.hostname or "").lower(), parts.port
    except ValueError:
        raise _bad(given, "it is no valid URL") from None
    if host in HUB_HOSTS:
        repo, _, tag = parts.path.strip("/").partition(":")
        return _parse_hub([unquote(step) for step in repo.split("/")], unquote(tag), given)
    if not host or parts.username or parts.password:
        raise _bad(given, "a URL needs a host, and no password in it")
    if not unquote(parts.path).lower().endswith(".gguf"):
        raise _bad(given, "the file that a URL names must end in .gguf")
    return UrlSource(given.partition("#")[0])


def _parse_hub(steps: Sequence[str], tag: str, given: str) -> HubSource:
    """`org/repo`, `org/repo:quant-or-file`, `org/repo/{resolve,blob}/revision/file`, `org/repo/tree/main`."""
    repo = "/".join(steps[:2])
    if _REPO.fullmatch(repo) is None or ".." in repo or "--" in repo or repo.endswith((".git", ".")):
        raise _bad(given, "a repository is written org/name")
    if len(steps) > 2:
        if list(steps[2:]) == ["tree", "main"] and not tag:
            return HubSource(repo)
        file = "/".join(steps[4:])
        if tag or steps[2] not in ("resolve", "blob") or len(steps) < 5 or not _safe(file) or not _safe(steps[3]):
            raise _bad(given, "write org/repo:quantisation, org/repo:file.gguf, or the URL of a file")
        return HubSource(repo, file=file, revision="" if steps[3] == "main" else steps[3])
    if not tag:
        return HubSource(repo)
    if "." in tag or "/" in tag:
        if not _safe(tag):
            raise _bad(given, f"{tag!r} is no file of a repository")
        return HubSource(repo, file=tag)
    if _TAG.fullmatch(tag) is None:
        raise _bad(given, f"{tag!r} is no quantisation; one looks like Q4_K_M")
    return HubSource(repo, quantization=tag.upper())


def _safe(file: str) -> bool:
    """No file of a repository leads out of it, and a `:` would be read as another tag."""
    steps = file.split("/")
    return file.isprintable() and ":" not in file and all(step.strip(". ") and step.strip() == step for step in steps)


def _stem(file: str) -> str:
    base = file.rpartition("/")[2]
    return split_part_name(base).stem if base.lower().endswith(".gguf") else base


def _named(files: Sequence[str], asked: str, repo: str) -> str:
    """A file by its path, or by its name where that is enough."""
    if asked in files:
        return asked
    same = [file for file in files if file.rpartition("/")[2].lower() == asked.rpartition("/")[2].lower()]
    if len(same) == 1:
        return same[0]
    ggufs = [file for file in files if file.lower().endswith(".gguf")]
    raise SourceRefused(
        "file_not_found", f"{repo} has no file {asked!r}; its GGUF files: {_listed(ggufs) or 'none at all'}"
    )


def _with_parts(file: str, ggufs: Sequence[str], repo: str) -> list[str]:
    """The file, or all parts of the model it is a part of. Raises: SourceRefused (`incomplete`)."""
    if not file.lower().endswith(".gguf"):
        return [file]
    group = _group(file)
    if group[2] == 1:
        return [file]
    return _complete(group, [other for other in ggufs if _group(other) == group], repo)


def _group(file: str) -> tuple[str, str, int]:
    """What the parts of one model have in common: folder, stem, count."""
    folder, _, base = file.rpartition("/")
    part = split_part_name(base)
    return folder, part.stem, part.count


def _complete(group: tuple[str, str, int], files: Sequence[str], repo: str) -> list[str]:
    by_number = {split_part_name(file.rpartition("/")[2]).number: file for file in files}
    wanted = range(1, group[2] + 1)
    missing = [number for number in wanted if number not in by_number] if group[2] <= 1_000 else [0]
    if missing:
        words = ", ".join(str(number) for number in missing[:8])
        raise SourceRefused(
            "incomplete", f"{repo} lacks part {words} of the {group[2]} of {group[1]}; take another quantisation"
        )
    return [by_number[number] for number in wanted]


def _of_quantization(ggufs: Sequence[str], source: HubSource) -> list[str]:
    by_quantization: dict[str, dict[tuple[str, str, int], list[str]]] = {}
    for file in ggufs:
        groups = by_quantization.setdefault(quantization_of(file), {})
        groups.setdefault(_group(file), []).append(file)
    wanted = source.quantization or _best(by_quantization)
    matching = by_quantization.get(wanted) or by_quantization.get(f"UD-{wanted}")
    known = sorted((name for name in by_quantization if name), key=_rank)
    if matching is None:
        raise SourceRefused(
            "quantization_not_found",
            f"{source.repo} has no {wanted}; it has {_listed(known) or 'files without a quantisation in their name: '}"
            + ("" if known else _listed(sorted(ggufs))),
        )
    stems = {(folder, stem) for folder, stem, _ in matching}
    if len(stems) > 1:
        shown = sorted(f"{folder}/{stem}".lstrip("/") for folder, stem in stems)
        raise SourceRefused(
            "ambiguous",
            f"{source.repo} has several models{f' of {wanted}' if wanted else ''}: {_listed(shown)}; name the file: "
            f"{source.repo}:{sorted(file for files in matching.values() for file in files)[0]}",
        )
    # Some repositories hold the same model whole and in parts.
    group = min(matching, key=lambda group: group[2])
    return _complete(group, matching[group], source.repo)


def _best(quantizations: dict[str, dict[tuple[str, str, int], list[str]]]) -> str:
    return min(quantizations, key=_rank)


def _rank(quantization: str) -> tuple[int, str]:
    known = QUANTIZATIONS.index(quantization) if quantization in QUANTIZATIONS else len(QUANTIZATIONS)
    return known, quantization


def _whole(files: Sequence[str], source: HubSource) -> tuple[ChosenFile, ...]:
    if source.quantization:
        raise SourceRefused(
            "bad_source",
            f"{source.repo}:{source.quantization}: a quantisation is chosen for llama.cpp only; name a file",
        )
    if source.file:
        file = _named(files, source.file, source.repo)
        return (ChosenFile(file, file.rpartition("/")[2]),)
    wanted = [file for file in files if not any(step.startswith(".") for step in file.split("/")) and _safe(file)]
    if not wanted:
        raise SourceRefused("file_not_found", f"{source.repo} holds no files")
    return tuple(ChosenFile(file, file) for file in sorted(wanted))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _bad(given: str, why: str) -> SourceRefused:
    return SourceRefused(
        "bad_source",
        f"{given[:200]!r} names no model: {why}. Write a name of 'meshctl models list --all', org/repo:quantisation, "
        "or the URL of a .gguf file",
    )
