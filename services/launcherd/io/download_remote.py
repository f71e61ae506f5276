"""What a hub or another server has, and its bytes: `huggingface_hub`'s client, its session for everything.

Only the public functions of `huggingface_hub` are used. Its own `hf_hub_download` writes to a file with a random name
and deletes that when it fails, so nothing could be gone on with; the bytes are therefore streamed here, through the
client's session (its endpoint, token, proxy and offline rules), with `Range`.

Source: docs/spec/downloads.md 10-19, 40-49; TRAPS 43.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

import httpx2
from huggingface_hub import HfApi, get_hf_file_metadata, get_session, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from services.launcherd.io.download_files import DownloadError, FileWriter, PartialFolder, RemoteFile
from services.launcherd.model_source import HubSource, UrlSource, checkpoint_of, choose_files, quantization_of
from shared.recipes import LLAMACPP
from shared.version import VERSION

CONNECT_SECONDS = 10.0
PIECE_BYTES = 16 * 1024**3
"""Asked for at once: servers in front of the hub refuse answers of more than 50 GB."""
TRANSIENT_STATUSES = frozenset({408, 421, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524})
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class Remote:
    """One request's view of the world. `stall_seconds`: so long may a server say nothing."""

    def __init__(self, stall_seconds: float, endpoint: str | None = None) -> None:
        """`endpoint` is the hub's; None: as `HF_ENDPOINT` says."""
        self.timeout = httpx2.Timeout(stall_seconds, connect=min(CONNECT_SECONDS, stall_seconds))
        self._stall = stall_seconds
        self._headers = build_hf_headers(library_name="meshd", library_version=VERSION)
        self._api = HfApi(endpoint=endpoint, library_name="meshd", library_version=VERSION)

    def plan(
        self, source: HubSource | UrlSource, name: str, recipe: str, mmproj: str
    ) -> tuple[str, tuple[RemoteFile, ...]]:
        """The files to fetch, and the checkpoint with what was chosen. Raises: DownloadError, SourceRefused."""
        with explained(source, self._stall):
            if isinstance(source, UrlSource):
                return source.url, (self._file_at(source.url, f"{name}.gguf"),)
            return self._hub_files(source, name, recipe, mmproj)

    def _hub_files(
        self, source: HubSource, name: str, recipe: str, mmproj: str
    ) -> tuple[str, tuple[RemoteFile, ...]]:
        info = self._api.model_info(
            source.repo, revision=source.revision or None, files_metadata=True, timeout=self._stall
        )
        siblings = {item.rfilename: item for item in info.siblings or ()}
        chosen = choose_files(list(siblings), source, name, whole=recipe != LLAMACPP, mmproj=mmproj)
        files = []
        for item in chosen:
            known = siblings[item.remote]
            # The commit pins the version: a push in the middle changes nothing for this download.
            revision = info.sha or source.revision or None
            url = hf_hub_url(source.repo, item.remote, revision=revision, endpoint=self._api.endpoint)
            sha256 = known.lfs.sha256 if known.lfs else ""
            size = known.lfs.size if known.lfs else known.size
            if sha256 and size is not None:
                files.append(_remote_file(url, item.remote, item.local, size, sha256))
                continue
            metadata = get_hf_file_metadata(url, headers=self._headers, timeout=self._stall)
            etag, size = metadata.etag or "", metadata.size if metadata.size is not None else size
            files.append(_remote_file(url, item.remote, item.local, -1 if size is None else size, etag))
        if recipe == LLAMACPP and not source.file and not source.quantization:
            quantization = quantization_of(chosen[0].remote)
            source = HubSource(source.repo, quantization, "" if quantization else chosen[0].remote)
        return checkpoint_of(source), tuple(files)

    def _file_at(self, url: str, local: str) -> RemoteFile:
        """What a plain server says of a file."""
        session = get_session()
        response = session.request("HEAD", url, headers=_IDENTITY, timeout=self.timeout)
        size = response.headers.get("Content-Length")
        if response.status_code in (403, 405, 501) or (response.is_success and size is None):
            # Not every server answers HEAD; two bytes tell the same.
            headers = {**_IDENTITY, "Range": "bytes=0-1"}
            with session.stream("GET", url, headers=headers, timeout=self.timeout) as answer:
                response = answer
                matched = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
                size = matched[3] if matched else answer.headers.get("Content-Length")
                if answer.status_code == 206 and not matched:
                    size = None
        hf_raise_for_status(response)
        linked = [item.headers.get("X-Linked-ETag", "").strip('W/"') for item in (*response.history, response)]
        sha256 = next((tag for tag in linked if _SHA256.fullmatch(tag)), "")
        etag = response.headers.get("ETag", "")
        size_bytes = int(size) if size is not None and size.isdigit() else -1
        version = f"{url}\n{etag}\n{response.headers.get('Last-Modified', '')}\n{size_bytes}"
        return RemoteFile(
            url=url,
            remote=unquote(urlsplit(url).path).rpartition("/")[2],
            local=local,
            size_bytes=size_bytes,
            key=sha256 or f"url-{hashlib.sha256(version.encode()).hexdigest()[:40]}",
            sha256=sha256,
            etag=etag if etag.startswith('"') else "",
        )

    def fetch(
        self,
        file: RemoteFile,
        writer: FileWriter,
        folder: PartialFolder,
        still_needed: Callable[[], int],
        on_bytes: Callable[[], None],
    ) -> None:
        """Bring the file to its end, from where it is. Raises: DownloadError."""
        with explained(file.remote, self._stall):
            while file.size_bytes < 0 or writer.size_bytes < file.size_bytes:
                before = writer.size_bytes
                complete = self._fetch_piece(file, writer, folder, still_needed, on_bytes)
                if complete and (file.size_bytes < 0 or writer.size_bytes >= file.size_bytes):
                    return
                if writer.size_bytes <= before:
                    raise DownloadError(
                        "truncated", f"{file.remote}: the server ended it after {before} bytes", transient=True
                    )

    def _fetch_piece(
        self,
        file: RemoteFile,
        writer: FileWriter,
        folder: PartialFolder,
        still_needed: Callable[[], int],
        on_bytes: Callable[[], None],
    ) -> bool:
        """One GET. Whether the server's answer reached the file's end as far as the server knows."""
        start = writer.size_bytes
        headers = {**_IDENTITY}
        if urlsplit(file.url).netloc == urlsplit(self._api.endpoint).netloc:
            # The session drops it where a redirect leads to another server.
            headers |= {name: value for name, value in self._headers.items() if name.lower() == "authorization"}
        last = start + PIECE_BYTES - 1
        if start or file.size_bytes > PIECE_BYTES:
            headers["Range"] = f"bytes={start}-" if file.size_bytes - start <= PIECE_BYTES else f"bytes={start}-{last}"
            if file.etag and not file.sha256 and start:
                headers["If-Range"] = file.etag
        with get_session().stream("GET", file.url, headers=headers, timeout=self.timeout) as response:
            if response.status_code == 416:
                writer.start_again()
                words = f"{file.remote}: the server has nothing after byte {start}; begun again"
                raise DownloadError("truncated", words, transient=True)
            hf_raise_for_status(response)
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise DownloadError("http_error", f"{file.remote}: the server sends it compressed, unasked")
            if response.status_code == 206:
                matched = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
                if matched is None or int(matched[1]) != start:
                    writer.start_again()
                    words = f"{file.remote}: the server sent another part than was asked for"
                    raise DownloadError("truncated", words, transient=True)
            elif start:
                # It does not know Range, or the file is another one now: from the beginning.
                writer.start_again()
            for chunk in response.iter_raw():
                if file.size_bytes >= 0 and writer.size_bytes + len(chunk) > file.size_bytes:
                    writer.start_again()
                    words = f"{file.remote} is longer than the {file.size_bytes} bytes that were announced"
                    raise DownloadError("checksum", words)
                writer.write(chunk)
                on_bytes()
                folder.check_space(still_needed())
        return True


_IDENTITY = {"Accept-Encoding": "identity"}


def _remote_file(url: str, remote: str, local: str, size_bytes: int, etag: str) -> RemoteFile:
    """The hub's etag is the SHA-256 of a large file, the Git hash of a small one."""
    key = etag if re.fullmatch(r"[A-Za-z0-9._-]{8,128}", etag) else hashlib.sha256(f"{url}{etag}".encode()).hexdigest()
    return RemoteFile(
        url=url,
        remote=remote,
        local=local,
        size_bytes=size_bytes,
        key=key,
        sha256=etag if _SHA256.fullmatch(etag) else "",
        git_sha1=etag if _SHA1.fullmatch(etag) else "",
    )


@contextmanager
def explained(subject: object, stall_seconds: float) -> Iterator[None]:
    """Turns what the client raises into a `DownloadError`; the type decides whether another try may help."""
    what = checkpoint_of(subject) if isinstance(subject, HubSource | UrlSource) else str(subject)
    try:
        yield
    except OfflineModeIsEnabled:
        raise DownloadError(
            "offline",
            f"{what} is not on this node's disk, and HF_HUB_OFFLINE keeps this node from fetching it; unset it and "
            "restart the node ('meshctl down', 'meshctl up'), or copy the file into a models folder",
        ) from None
    except HfHubHTTPError as error:
        raise _http_error(what, error) from error
    except EntryNotFoundError as error:
        raise DownloadError("file_not_found", f"{what}: there is no such file") from error
    except FileMetadataError as error:
        raise DownloadError(
            "http_error", f"{what}: the server at HF_ENDPOINT does not answer like a hub ({error})"
        ) from error
    except HFValidationError as error:
        raise DownloadError("bad_source", f"{what} is no repository: {error}") from error
    except (httpx2.ReadTimeout, httpx2.WriteTimeout) as error:
        raise DownloadError(
            "stalled", f"{what}: the server sent nothing for {stall_seconds:g} s", transient=True
        ) from error
    except httpx2.TransportError as error:
        words = str(error) or type(error).__name__
        raise DownloadError("network", f"{what}: the connection failed ({words})", transient=True) from error
    except (httpx2.InvalidURL, httpx2.HTTPError, httpx2.StreamError) as error:
        raise DownloadError("http_error", f"{what}: {error or type(error).__name__}") from error


def _http_error(what: str, error: HfHubHTTPError) -> DownloadError:
    status = error.response.status_code
    if isinstance(error, RevisionNotFoundError | EntryNotFoundError):
        return DownloadError("file_not_found", f"{what}: there is no such file or version")
    if isinstance(error, DisabledRepoError):
        return DownloadError("not_authorised", f"{what}: the hub has disabled this repository")
    if isinstance(error, GatedRepoError):
        return DownloadError(
            "not_authorised",
            f"{what}: its owner asks for your consent first; accept the terms on its page, set HF_TOKEN and restart "
            "the node ('meshctl down', 'meshctl up')",
        )
    if status in (401, 403):
        return DownloadError(
            "not_authorised",
            f"{what}: the server refuses this node (HTTP {status}): there is no such repository, or it is private, and "
            "HF_TOKEN is missing or does not open it. Set it and restart the node ('meshctl down', 'meshctl up')",
        )
    if isinstance(error, RepositoryNotFoundError) or status in (404, 410):
        return DownloadError("repository_not_found", f"{what}: there is nothing of that name (HTTP {status})")
    if status in TRANSIENT_STATUSES:
        after = error.response.headers.get("Retry-After", "")
        words = "asks for patience" if status == 429 else "has trouble"
        return DownloadError(
            "rate_limited" if status == 429 else "server_error",
            f"{what}: the server {words} (HTTP {status})",
            transient=True,
            retry_after_seconds=float(after) if after.isdigit() else 0.0,
        )
    return DownloadError("http_error", f"{what}: the server answered HTTP {status}")
