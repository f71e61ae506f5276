"""From the bodies that Lemonade Server's clients send to launcherd's messages, and from its refusals to HTTP.

Only the fields named here have any effect: sampling fields and whatever else a client sends along never become options
of an engine. Fields without effect are named in the answer of a load.

Source: docs/spec/lemonade.md; TRAPS 25.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from services.proxyd.lemonade import model_facts, unknown_model
from services.proxyd.local_view import LocalView
from services.proxyd.replies import Failure
from shared.errors import RequestRefused
from shared.ids import ModelName
from shared.messages.downloads import DeleteModel, PullModel
from shared.messages.models import MODEL_TYPES, LoadModel, PinModel, SetMaxLoadedModels, UnloadModel

NAME_CHARACTERS = 512
TEXT_CHARACTERS = 8192
CONTEXT_LIMIT_TOKENS = 1 << 30
SETTABLE = ("max_loaded_models",)

Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS)]
Text = Annotated[str, Field(max_length=TEXT_CHARACTERS)]
_BY_EITHER_NAME = AliasChoices("model_name", "model")


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=())


class _Registration(_Body):
    """What names a model that is not known yet."""

    model_name: Name = Field(validation_alias=_BY_EITHER_NAME)
    checkpoint: Text | None = None
    checkpoints: dict[str, Text] | None = None
    recipe: Annotated[str, Field(max_length=64)] | None = None
    mmproj: Text | None = None
    labels: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=32)] | None = None
    reasoning: bool | None = None
    vision: bool | None = None
    embedding: bool | None = None
    reranking: bool | None = None
    image: bool | None = None

    def pull(self) -> PullModel:
        """The download, with the registration where there is one."""
        parts = self.checkpoints or {}
        marks = {
            "reasoning": self.reasoning, "vision": self.vision, "embeddings": self.embedding,
            "reranking": self.reranking, "image": self.image,
        }  # fmt: skip
        labels = (*(self.labels or ()), *(label for label, is_set in marks.items() if is_set))
        return PullModel(
            model=self.model_name,
            checkpoint=self.checkpoint or parts.get("main", ""),
            recipe=self.recipe or "",
            labels=tuple(dict.fromkeys(labels)),
            mmproj=self.mmproj or parts.get("mmproj", "").rpartition(":")[2],
        )


class PullBody(_Registration):
    """``POST pull``"""

    stream: bool = False


class LoadBody(_Registration):
    """``POST load``. Of the options named after a recipe those of the model's own count."""

    ctx_size: Annotated[int, Field(ge=-1, le=CONTEXT_LIMIT_TOKENS)] | None = None
    pinned: bool | None = None
    llamacpp_backend: Name | None = None
    llamacpp_args: Text | None = None
    whispercpp_backend: Name | None = None
    whispercpp_args: Text | None = None
    sdcpp_backend: Name | None = Field(default=None, validation_alias=AliasChoices("sd-cpp_backend", "sdcpp_backend"))
    sdcpp_args: Text | None = Field(default=None, validation_alias=AliasChoices("sd-cpp_args", "sdcpp_args"))
    flm_args: Text | None = None


class UnloadBody(_Body):
    """``POST unload``"""

    model_name: Annotated[str, Field(max_length=NAME_CHARACTERS)] | None = Field(
        default=None, validation_alias=_BY_EITHER_NAME
    )


class DeleteBody(_Body):
    """``POST delete``"""

    model_name: Name = Field(validation_alias=_BY_EITHER_NAME)


class PinBody(_Body):
    """``POST internal/pin``"""

    model_name: Name = Field(validation_alias=_BY_EITHER_NAME)
    pinned: bool


class SetBody(_Body):
    """``POST internal/set``"""

    max_loaded_models: Any = None
    """`set_limits` reads it: one refusal for whatever it may be."""


B = TypeVar("B", bound=_Body)


def read_body(kind: type[B], body: bytes) -> B:
    """The body of a request; an empty one is ``{}``. Raises: Failure."""
    try:
        return kind.model_validate_json(body if body.strip() else b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        why = str(first.get("ctx", {}).get("error", first["msg"]))
        raise Failure(400, "invalid_json", f"the request body is not valid JSON: {why}")
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        raise Failure(400, "missing_field", f"the request body needs the field {where!r}", param=where)
    if not where:
        raise Failure(400, "invalid_json", "the request body must be a JSON object")
    raise Failure(400, "invalid_value", f"{where}: {first['msg']}", param=where)


# -- to messages --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """``pull`` first, where the model is not on this disk yet; ``ignored`` names fields without effect."""

    load: LoadModel
    pull: PullModel | None
    ignored: tuple[str, ...]

    def after_pull(self, name: str) -> LoadPlan:
        """The same for a model that is on the disk now, under the name that launcherd gave it."""
        return replace(self, load=replace(self.load, model=ModelName(name)), pull=None)


def plan_load(body: LoadBody, view: LocalView) -> LoadPlan:
    """What a load takes. Raises: Failure when nobody knows the model, or an option cannot be read."""
    local = view.on_disk(body.model_name)
    name = ModelName(body.model_name) if local is None else local.name
    pull = None
    recipe = body.recipe or "llamacpp"
    if local is not None:
        recipe = local.recipe
    elif name in view.registry or body.pull().checkpoint:
        pull = body.pull()
        recipe = view.registry[name].recipe if name in view.registry else recipe
    elif view.settled:
        raise unknown_model(body.model_name, view)
    prefix = recipe.replace("-", "")
    backend, text = getattr(body, f"{prefix}_backend", None), getattr(body, f"{prefix}_args", None)
    load = LoadModel(
        model=name,
        context_tokens=max(0, body.ctx_size or 0),
        extra_args=None if text is None else split_args(f"{prefix}_args", text),
        backend=backend or "",
        pinned=body.pinned,
    )
    return LoadPlan(load, pull, _ignored(body, prefix))


def _ignored(body: LoadBody, prefix: str) -> tuple[str, ...]:
    of_others = (
        field for field in type(body).model_fields
        if field.endswith(("_backend", "_args")) and not field.startswith(prefix) and getattr(body, field) is not None
    )  # fmt: skip
    return tuple(sorted({*(body.model_extra or ()), *of_others}))


def split_args(field: str, text: str) -> tuple[str, ...]:
    """Arguments as a shell would split them. Raises: Failure."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise Failure(
            400, "invalid_value", f"{field} cannot be split into arguments: {error}; close every quote", param=field
        ) from None


def set_limits(body: SetBody) -> SetMaxLoadedModels:
    """Raises: Failure."""
    unknown = sorted(body.model_extra or ())
    if unknown:
        raise Failure(
            400,
            "unknown_setting",
            f"{', '.join(unknown)[:200]} cannot be set in a running node; what can be: {', '.join(SETTABLE)}. "
            "Everything else is in mesh.toml: 'meshctl config show' lists it",
            param=unknown[0],
        )
    given = body.max_loaded_models
    if given is None:
        raise Failure(400, "missing_field", f"nothing to set; what can be set: {', '.join(SETTABLE)}")
    limits = tuple(given) if isinstance(given, list) else (given,)
    wrong = any(type(limit) is not int or limit < -1 or limit == 0 for limit in limits)
    if wrong or not 1 <= len(limits) <= len(MODEL_TYPES):
        raise Failure(
            400,
            "invalid_value",
            "max_loaded_models is 1 or more, or -1 for no limit; one number for every type, or up to "
            f"{len(MODEL_TYPES)} for {' '.join(MODEL_TYPES)}",
            param="max_loaded_models",
        )
    return SetMaxLoadedModels(limits=limits)


def unload_message(body: UnloadBody, view: LocalView) -> UnloadModel:
    """One model, or all of them."""
    return UnloadModel(model=known_name(body.model_name, view) if body.model_name else None)


def pin_message(body: PinBody, view: LocalView) -> PinModel:
    return PinModel(model=known_name(body.model_name, view), pinned=body.pinned)


def delete_message(body: DeleteBody, view: LocalView) -> DeleteModel:
    return DeleteModel(model=known_name(body.model_name, view))


def known_name(name: str, view: LocalView) -> ModelName:
    """launcherd's own name, where a client says the mesh's or that of the file."""
    local = view.on_disk(name)
    return view.local_name(ModelName(name)) if local is None else local.name


# -- refusals -----------------------------------------------------------------------------------------------

_STATUS_OF = {
    **dict.fromkeys(
        (
            "config", "schema", "option_refused", "backend_unknown", "recipe_unknown", "bad_source", "bad_name",
            "bad_labels", "ambiguous", "no_gguf",
        ),
        400,
    ),
    **dict.fromkeys(
        (
            "model_not_found", "model_file_missing", "not_loaded", "not_downloading", "file_not_found",
            "quantization_not_found", "repository_not_found",
        ),
        404,
    ),
    **dict.fromkeys(
        (
            "name_taken", "cancelled", "unloaded", "withdrawn", "finished", "all_pinned", "not_ours", "incomplete",
            "client", "downloading", "offline",
        ),
        409,
    ),
    "overloaded": 429,
    **dict.fromkeys(("idle", "starting", "daemon_unreachable"), 503),
    **dict.fromkeys(("state_not_writable", "disk_full"), 507),
}  # fmt: skip
"""500 for what is not listed: a load or a download that failed."""
_NAME_OF = {"all_pinned": "slots_pinned_error"}
"""Codes that Lemonade's clients look for."""


def failure_of(error: RequestRefused) -> Failure:
    """What launcherd's refusal is in HTTP: 400 what was badly asked, 404 what is not there, 409 what the present state
    forbids, 500 a load or download that failed."""
    status = _STATUS_OF.get(error.code, 500)
    retry = error.retry_after_seconds
    if retry is None and status in (429, 503):
        retry = 1.0
    return Failure(status, _NAME_OF.get(error.code, error.code), error.detail, retry_after_seconds=retry)


def dump_load(plan: LoadPlan, view: LocalView) -> dict[str, Any]:
    """The answer of a load that succeeded."""
    local, registered = view.inventory.get(plan.load.model), view.registry.get(plan.load.model)
    facts = model_facts(view, local, registered) if local or registered else {}
    name = view.mesh_name(plan.load.model)
    return {
        "status": "success",
        "model_name": name,
        "checkpoint": facts.get("checkpoint", ""),
        "recipe": facts.get("recipe", ""),
        "message": f"Loaded model: {name}",
        **({"ignored": list(plan.ignored)} if plan.ignored else {}),
    }
