"""Downloads as a state machine: one at a time, the others wait and say for what.

    queued ---------> resolving ---> downloading <--> verifying ---> done
      ^  (its turn)       |               |               |
      +-------------------+---------------+---------------+  a transient failure: again after a pause, in the meantime
      |                                                      the next one has its turn
      +--> failed (for good, or too often without any progress)      cancelled (from every state before `done`)

A download ends for good only when its process is gone and, after a success, the inventory knows the model: a reply
`Done` means that it can be loaded. What is not ended is remembered, so that the next launcherd goes on with it.

Source: docs/spec/downloads.md 20-39; TRAPS 43.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from services.launcherd.download_events import (
    AskerGone,
    CancelAsked,
    DownloadEffect,
    DownloadEnded,
    DownloadFailed,
    DownloadPlanned,
    DownloadProgressed,
    DownloadReply,
    DownloadsRestored,
    DownloadStimulus,
    DownloadSucceeded,
    DownloadToken,
    InstallModel,
    JobId,
    ModelInstalled,
    PublishDownload,
    PullAsked,
    RememberPending,
    StartDownload,
    StopDownload,
    Wanted,
)
from shared.ids import ModelName
from shared.io.drive import Tick
from shared.messages.daemon import Done, Refused
from shared.messages.downloads import DownloadChanged, DownloadState
from shared.words import size_words

RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0)
"""Pauses after failures in a row without a byte of progress between them; one more failure is the last."""
RETRY_AFTER_LIMIT_SECONDS = 900.0
GARBLED_TRIES = 2
"""A file with the wrong hash is fetched from its beginning this often in all."""
DEATHS_LIMIT = 3
"""So often in a row the process may die without a word."""
PUBLISH_SECONDS = 0.25
RATE_WINDOW_SECONDS = 5.0


@dataclass(slots=True)
class Download:
    """One model under way."""

    wanted: Wanted
    job: JobId | None = None
    state: DownloadState = "queued"
    reason: str = ""
    waiters: list[DownloadToken] = field(default_factory=list)
    cancellers: list[DownloadToken] = field(default_factory=list)
    late: list[tuple[DownloadToken, bool, Wanted]] = field(default_factory=list)
    """Asked for it again while it was being cancelled."""
    failures: int = 0
    garbled: int = 0
    deaths: int = 0
    retry_at: float = 0.0
    outcome: DownloadSucceeded | DownloadFailed | None = None
    checkpoint: str = ""
    file: str = ""
    file_index: int = 0
    file_count: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    best_bytes: int = 0
    samples: deque[tuple[float, int]] = field(default_factory=deque)
    news_at: float = 0.0
    """When its process spoke last."""
    published_at: float = -1.0
    dirty: bool = False

    @property
    def name(self) -> ModelName:
        return self.wanted.name

    @property
    def cancelling(self) -> bool:
        return bool(self.cancellers)

    def rate(self) -> float:
        """Bytes per second over the last seconds."""
        if len(self.samples) < 2:
            return 0.0
        (start, first), (end, last) = self.samples[0], self.samples[-1]
        return max(0.0, (last - first) / (end - start)) if end > start else 0.0

    def view(self) -> DownloadChanged:
        return DownloadChanged(
            model=self.name,
            checkpoint=self.checkpoint or self.wanted.checkpoint,
            state=self.state,
            reason=self.reason,
            code=self.outcome.code if self.state == "failed" and isinstance(self.outcome, DownloadFailed) else "",
            file=self.file,
            file_index=self.file_index,
            file_count=self.file_count,
            bytes_done=self.bytes_done,
            bytes_total=self.bytes_total,
            bytes_per_second=round(self.rate(), 1),
        )


class Downloads:
    """`now` is monotonic, in seconds."""

    def __init__(self) -> None:
        self._all: dict[ModelName, Download] = {}
        self._active: Download | None = None
        self._jobs = 0
        self._effects: list[DownloadEffect] = []
        self._now = 0.0

    def handle(self, stimulus: DownloadStimulus | Tick, *, now: float) -> list[DownloadEffect]:
        self._now = now
        match stimulus:
            case PullAsked():
                self._pull(stimulus)
            case CancelAsked():
                self._cancel(stimulus)
            case AskerGone(token=token):
                self._forget_asker(token)
            case DownloadsRestored(pending=pending):
                for wanted in pending:
                    if wanted.name not in self._all:
                        self._add(wanted)
            case DownloadPlanned() | DownloadProgressed() | DownloadSucceeded() | DownloadFailed() | DownloadEnded():
                download = self._active
                # News of an earlier run come too late to mean anything.
                if download is not None and download.job == stimulus.job:
                    self._news(download, stimulus)
            case ModelInstalled():
                self._installed(stimulus)
            case Tick():
                self._notice_silence()
        self._next_turn()
        for download in self._all.values():
            if download.dirty and now >= download.published_at + PUBLISH_SECONDS:
                self._publish(download)
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> float | None:
        times = [item.published_at + PUBLISH_SECONDS for item in self._all.values() if item.dirty]
        if self._active is None:
            times += [item.retry_at for item in self._all.values()]
        elif self._active.samples:
            times.append(self._active.news_at + RATE_WINDOW_SECONDS)
        return min(times, default=None)

    def snapshot(self) -> Iterator[DownloadChanged]:
        """What is not ended."""
        for download in self._all.values():
            yield download.view()

    def underway(self, name: str) -> DownloadChanged | None:
        """The download of a model, if there is one."""
        found = self._all.get(ModelName(name))
        return found.view() if found is not None else None

    def explain(self, name: str, now: float) -> tuple[str, ...]:
        """What a model waits for that is on its way; empty when it is not."""
        found = self._all.get(ModelName(name))
        if found is None:
            return ()
        checkpoint = found.checkpoint or found.wanted.checkpoint
        words = f"{name} is on its way from {checkpoint}: {found.state}, {found.reason}."
        if found.state == "downloading" and found.bytes_total:
            words += f" {size_words(found.bytes_done)} of {size_words(found.bytes_total)} are here"
            silent = now - found.news_at
            words += f", nothing came for {silent:.0f} s." if silent >= RATE_WINDOW_SECONDS else "."
        return (words,)

    def check_invariants(self) -> None:
        """Raises: AssertionError."""
        running = [item for item in self._all.values() if item.job is not None]
        assert running == ([] if self._active is None else [self._active]), "two downloads at once"
        tokens = [
            token
            for item in self._all.values()
            for token in (*item.waiters, *item.cancellers, *(asked[0] for asked in item.late))
        ]
        assert len(tokens) == len(set(tokens)), "a token waits twice"
        assert not self._effects

    # -- requests --------------------------------------------------------------------------------------------

    def _pull(self, asked: PullAsked) -> None:
        download = self._all.get(asked.wanted.name)
        if download is not None and download.cancelling:
            download.late.append((asked.token, asked.wait, asked.wanted))
            return
        if download is not None and not same_files(download.wanted, asked.wanted):
            words = f"{asked.wanted.name} is being downloaded from {download.wanted.checkpoint} just now"
            self._refuse(asked.token, "name_taken", f"{words}; wait for that or cancel it first")
            return
        if download is None:
            download = self._add(asked.wanted)
        if asked.wait:
            download.waiters.append(asked.token)
        else:
            self._reply(asked.token, Done(detail=f"{download.name} is {download.state}", subject=download.name))

    def _add(self, wanted: Wanted) -> Download:
        download = Download(wanted)
        self._all[wanted.name] = download
        self._remember()
        self._set(download, "queued", "it is its turn next")
        return download

    def _cancel(self, asked: CancelAsked) -> None:
        download = self._all.get(asked.name)
        if download is None:
            self._refuse(asked.token, "not_downloading", f"{asked.name} is not being downloaded")
        elif isinstance(download.outcome, DownloadSucceeded):
            self._refuse(asked.token, "finished", f"{asked.name} is complete; 'meshctl models rm' deletes it")
        elif download.job is None:
            download.cancellers.append(asked.token)
            self._cancelled(download)
        else:
            if not download.cancelling:
                self._effects.append(StopDownload(job=download.job))
            download.cancellers.append(asked.token)
            self._set(download, download.state, "being cancelled")

    def _forget_asker(self, token: DownloadToken) -> None:
        for download in self._all.values():
            if token in download.waiters:
                download.waiters.remove(token)
            # A canceller that went away has cancelled all the same.
            download.late = [asked for asked in download.late if asked[0] != token]

    # -- the one under way -----------------------------------------------------------------------------------

    def _next_turn(self) -> None:
        if self._active is None:
            ready = [item for item in self._all.values() if item.outcome is None and item.retry_at <= self._now]
            if ready:
                download = min(ready, key=lambda item: item.retry_at)
                self._jobs += 1
                download.job = JobId(self._jobs)
                download.samples.clear()
                self._active = download
                self._effects.append(StartDownload(job=download.job, wanted=download.wanted))
                self._set(download, "resolving", "asks what there is to fetch")
        if self._active is not None:
            for item in self._all.values():
                if item.state == "queued" and item.retry_at <= self._now:
                    self._set(item, "queued", f"waits for the download of {self._active.name}")

    def _news(
        self,
        download: Download,
        news: DownloadPlanned | DownloadProgressed | DownloadSucceeded | DownloadFailed | DownloadEnded,
    ) -> None:
        download.news_at = self._now
        match news:
            case DownloadPlanned():
                download.file_count, download.checkpoint = news.file_count, news.checkpoint
                download.bytes_total, download.bytes_done = news.bytes_total, news.bytes_done
                download.best_bytes = max(download.best_bytes, news.bytes_done)
                download.samples.append((self._now, news.bytes_done))
                words = f"{size_words(news.bytes_total)} in {news.file_count} file{'s' if news.file_count != 1 else ''}"
                self._set(download, "downloading", words if not download.cancelling else download.reason)
            case DownloadProgressed():
                self._progress(download, news)
            case DownloadSucceeded() | DownloadFailed():
                download.outcome = download.outcome or news
            case DownloadEnded():
                self._ended(download, news)

    def _notice_silence(self) -> None:
        """Nobody shall be shown a rate at which nothing comes any more."""
        download = self._active
        if download is not None and download.samples and self._now >= download.news_at + RATE_WINDOW_SECONDS:
            download.samples.clear()
            download.dirty = True

    def _progress(self, download: Download, news: DownloadProgressed) -> None:
        if news.bytes_done > download.best_bytes:
            # More than ever before: a server that always breaks off at the same byte makes no progress.
            download.best_bytes = news.bytes_done
            download.failures = download.deaths = 0
        at_once = news.file_index != download.file_index
        download.file, download.file_index, download.bytes_done = news.file, news.file_index, news.bytes_done
        download.samples.append((self._now, news.bytes_done))
        while len(download.samples) > 2 and download.samples[1][0] <= self._now - RATE_WINDOW_SECONDS:
            download.samples.popleft()
        download.dirty = True
        state: DownloadState = "verifying" if news.verifying else "downloading"
        if state != download.state and not download.cancelling:
            self._set(download, state, "compares what is there with its checksum" if news.verifying else news.file)
        elif at_once:
            self._publish(download)

    def _ended(self, download: Download, news: DownloadEnded) -> None:
        download.job = self._active = None
        download.samples.clear()
        outcome = download.outcome
        if isinstance(outcome, DownloadSucceeded):
            if download.cancelling:
                for token in download.cancellers:
                    self._refuse(token, "finished", f"{download.name} was complete before it could be cancelled")
                download.cancellers.clear()
                for token, wait, _ in download.late:
                    self._wait_or_done(download, token, wait)
                download.late.clear()
            wanted = replace(download.wanted, checkpoint=download.checkpoint or download.wanted.checkpoint)
            self._set(download, "verifying", "reads the models folders again")
            self._effects.append(InstallModel(wanted=wanted))
        elif download.cancelling:
            self._cancelled(download)
        elif outcome is None:
            download.deaths += 1
            detail = f"the process that downloads {download.name} {news.how}"
            died = DownloadFailed(job=news.job, code="download_died", detail=detail, transient=True)
            self._failed(download, died, final=download.deaths >= DEATHS_LIMIT)
        else:
            download.deaths = 0
            garbled = outcome.code == "checksum"
            download.garbled += garbled
            again = outcome.transient or (garbled and download.garbled < GARBLED_TRIES)
            self._failed(download, outcome, final=not again)

    def _failed(self, download: Download, failure: DownloadFailed, *, final: bool) -> None:
        if not final and download.failures < len(RETRY_SECONDS):
            pause = RETRY_SECONDS[download.failures]
            download.failures += 1
            pause = max(pause, min(failure.retry_after_seconds, RETRY_AFTER_LIMIT_SECONDS))
            download.retry_at = self._now + pause
            download.outcome = None
            self._set(download, "queued", f"{failure.detail}; tried again in {pause:.0f} s, what is there is kept")
            return
        download.outcome = failure
        words = failure.detail
        if not final:
            words += "; given up after several attempts. What is there is kept: pull it again to go on"
        self._end(download, "failed", words, Refused(code=failure.code, detail=words))

    def _installed(self, news: ModelInstalled) -> None:
        download = self._all.get(news.name)
        if download is None or not isinstance(download.outcome, DownloadSucceeded):
            return
        if news.reason:
            download.outcome = DownloadFailed(job=JobId(0), code="not_usable", detail=news.reason, transient=False)
            self._end(download, "failed", news.reason, Refused(code="not_usable", detail=news.reason))
            return
        download.bytes_done = download.bytes_total
        words = f"{download.name} is on this node's disk, {size_words(download.bytes_total)}"
        self._end(download, "done", words, Done(detail=words, subject=download.name))

    def _cancelled(self, download: Download) -> None:
        words = "cancelled; what is there is kept for the next time"
        refused = Refused(code="cancelled", detail=f"the download of {download.name} was {words}")
        cancellers, late = download.cancellers, download.late
        download.late = []
        self._end(download, "cancelled", words, refused)
        for token in cancellers:
            self._reply(token, Done(detail=f"the download of {download.name} is {words}", subject=download.name))
        for token, wait, wanted in late:
            self._pull(PullAsked(token=token, wanted=wanted, wait=wait))

    def _end(self, download: Download, state: DownloadState, reason: str, reply: Done | Refused) -> None:
        del self._all[download.name]
        self._remember()
        self._set(download, state, reason)
        for token in download.waiters:
            self._reply(token, reply)
        download.waiters.clear()

    # -- effects ---------------------------------------------------------------------------------------------

    def _wait_or_done(self, download: Download, token: DownloadToken, wait: bool) -> None:
        if wait:
            download.waiters.append(token)
        else:
            self._reply(token, Done(detail=f"{download.name} is complete", subject=download.name))

    def _set(self, download: Download, state: DownloadState, reason: str) -> None:
        """A change of state is published at once."""
        if (download.state, download.reason) != (state, reason) or download.published_at < 0:
            download.state, download.reason = state, reason
            self._publish(download)

    def _publish(self, download: Download) -> None:
        download.published_at, download.dirty = self._now, False
        self._effects.append(PublishDownload(message=download.view()))

    def _remember(self) -> None:
        self._effects.append(RememberPending(pending=tuple(item.wanted for item in self._all.values())))

    def _reply(self, token: DownloadToken, message: Done | Refused) -> None:
        self._effects.append(DownloadReply(token=token, message=message))

    def _refuse(self, token: DownloadToken, code: str, detail: str) -> None:
        self._reply(token, Refused(code=code, detail=detail))


def same_files(one: Wanted, other: Wanted) -> bool:
    return (one.checkpoint, one.mmproj, one.recipe) == (other.checkpoint, other.mmproj, other.recipe)
