"""Every error a meshd process raises on purpose.

An error says what happened, why, and what to do next. ``code`` is the stable word that crosses process
boundaries (in :class:`shared.messages.daemon.Refused`); ``detail`` is the sentence for people.
"""

from __future__ import annotations


class MeshError(Exception):
    """Base of all expected failures."""

    code = "error"

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class SchemaError(MeshError):
    """Bytes that are not one of our messages. Raised by the codec for any malformed input, and nothing else."""

    code = "schema"


class UnknownTag(SchemaError):
    """A well-formed message of a kind this version does not know: counted and dropped."""

    code = "unknown_tag"


class ConfigError(MeshError):
    """``mesh.toml`` or a ``MESH_*`` variable cannot be used."""

    code = "config"


class StateError(MeshError):
    """The state directory cannot be used: permissions, full disk, path too long, owned by another node."""

    code = "state"


class AlreadyRunning(StateError):
    """Another process holds this daemon's lock for the same ``MESH_HOME``."""

    code = "already_running"


class DaemonUnreachable(MeshError):
    """A daemon did not answer on the bus before the deadline."""

    code = "daemon_unreachable"


class StillStarting(MeshError):
    """A daemon that was just started does not know enough yet to say anything: ask again in a moment.

    Refusing its snapshot so, it leaves in place what its earlier life had said.
    """

    code = "starting"


class RequestRefused(MeshError):
    """A daemon answered a request with ``Refused``."""

    def __init__(self, code: str, detail: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.retry_after_seconds = retry_after_seconds


class PeerUnreachable(MeshError):
    """Another node could not be reached."""

    code = "peer_unreachable"


class CertificateRefused(MeshError):
    """A certificate, chain or signing request does not prove what it should."""

    code = "certificate_refused"


class InviteRefused(MeshError):
    """A token or invite cannot be used; ``code`` tells which way."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class StreamLost(MeshError):
    """A stream between nodes ended other than by its peer's clean end: what came so far is not the whole."""

    code = "stream_lost"


class NoRoute(MeshError):
    """No host serves the model."""

    code = "no_route"


class LoadFailed(MeshError):
    """A model did not become ready. Every kind counts for evict-all-and-retry, but those where no other model can be
    to blame: :class:`ModelFileMissing`, :class:`EngineMissing`, :class:`OptionRefused`, :class:`StateNotWritable`.
    """

    code = "load_failed"


class ModelFileMissing(LoadFailed):
    """The model's file is not there (any more)."""

    code = "model_file_missing"


class ModelFileBroken(LoadFailed):
    """The model's file is not a readable GGUF."""

    code = "model_file_broken"


class EngineMissing(LoadFailed):
    """No inference engine is installed."""

    code = "engine_missing"


class OptionRefused(LoadFailed):
    """An option of a load that may not be given, or means nothing."""

    code = "option_refused"


class BackendUnknown(OptionRefused):
    """A build of llama.cpp that this node does not know."""

    code = "backend_unknown"


class RecipeUnknown(OptionRefused):
    """A model's recipe is not one of this node's."""

    code = "recipe_unknown"


class EngineExited(LoadFailed):
    """The engine process ended before it was ready. ``status`` is the exit status, negative for a signal."""

    code = "engine_exited"

    def __init__(self, detail: str, status: int | None = None) -> None:
        super().__init__(detail)
        self.status = status


class EnginePortTaken(LoadFailed):
    """Another process took the engine's port first: retry on another one."""

    code = "engine_port_taken"


class LoadTimedOut(LoadFailed):
    """The engine did not become ready in time."""

    code = "load_timed_out"


class StateNotWritable(LoadFailed):
    """The node's own folder cannot be written, so that no engine can be started."""

    code = "state_not_writable"


class ModelTooLarge(LoadFailed):
    """The model needs more memory than the device has, whatever is evicted."""

    code = "model_too_large"
