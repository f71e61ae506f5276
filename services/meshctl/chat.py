"""``chat`` and ``run``: talk to a model over the node's own HTTP endpoint, as any client would."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from services.meshctl.completion import complete_model
from services.meshctl.http_client import chat_events
from services.meshctl.load import load_model
from services.meshctl.node import Node
from services.meshctl.output import clean, fail, print_json, progress
from services.meshctl.pull import can_be_pulled
from services.meshctl.up import bring_up, changes_of
from shared.errors import MeshError
from shared.ids import ModelName
from shared.messages.models import LoadModel

if TYPE_CHECKING:
    from shared.node_status import NodeStatus

HELP_TEXT = "Type a message. /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer."


class NoModel(MeshError):
    code = "no_model"


@click.command()
@click.argument("model", required=False, shell_complete=complete_model)
@click.option("--message", "-m", metavar="TEXT", help="One question, one answer. Also read from stdin in a pipe.")
@click.option("--system", metavar="TEXT", help="Instructions for the model.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer.")
@click.option("--temperature", type=float, help="0 gives the same answer every time.")
@click.option("--key", envvar="MESH_API_KEY", default="", help="API key, if not this node's own.  [env: MESH_API_KEY]")
@click.option("--json", "as_json", is_flag=True, help="Print the one answer as JSON.")
def chat(
    model: str | None,
    message: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    key: str,
    as_json: bool,
) -> None:
    """Talk to MODEL (the ready one if there is only one to choose).

    A model that is not loaded is loaded first.
    """
    node = Node()
    node.running()
    view = node.status()
    name = model or choose_model(view)
    if not _is_ready(view, name) or (not _is_known(view, name) and can_be_pulled(node, name)):
        load_model(node, LoadModel(model=ModelName(name)))
    talk = Talk(node, view.addresses.api, name, system, {"max_tokens": max_tokens, "temperature": temperature}, key)
    converse(talk, message, as_json)


@click.command("run")
@click.argument("model", shell_complete=complete_model)
@click.argument("prompt", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the one answer as JSON.")
def run(model: str, prompt: str | None, as_json: bool) -> None:
    """Start the node if it is down, load MODEL (a name or a .gguf file) and talk to it, or answer PROMPT."""
    node = Node()
    changes = changes_of(node, (model,), ()) if model.endswith(".gguf") else {}
    name = str(changes["models", "serve"][0]) if changes else model
    changes = {where: value for where, value in changes.items() if where != ("models", "serve")}
    if node.supervised is None or changes:
        bring_up(node, changes)
        node = Node()
    loaded = load_model(node, LoadModel(model=ModelName(name)))
    if not loaded.already:
        progress(f"{loaded.model} is ready, loaded in {loaded.load_seconds:.1f} s")
    converse(Talk(node, node.status().addresses.api, loaded.model), prompt, as_json)


def choose_model(view: NodeStatus) -> str:
    """The ready llm, rather the owner's than the guide; else the guide. Raises: NoModel."""
    ready = [model for model in view.models if model.type == "llm" and model.status == "ready"]
    own = [model for model in ready if not model.builtin]
    if len(own) > 1:
        names = ", ".join(model.name for model in own)
        raise NoModel(f"several models are ready ({names}); say which: meshctl chat {own[0].name}")
    guide = [model for model in view.models if model.builtin and model.type == "llm"]
    for model in (*own, *ready, *guide):
        progress(f"Model: {model.name}" + (" (the tiny guide that ships with meshd)" if model.builtin else ""))
        return model.name
    raise NoModel("no model is known; put a .gguf file into ~/.models, then 'meshctl models list'")


def _is_ready(view: NodeStatus, name: str) -> bool:
    """Ready here or elsewhere; names that this node does not know are left to the endpoint (aliases)."""
    found = next((model for model in view.models if model.name == name), None)
    return found is None or found.status == "ready"


def _is_known(view: NodeStatus, name: str) -> bool:
    return any(model.name == name for model in view.models)


class Talk:
    """One conversation with one model."""

    def __init__(
        self,
        node: Node,
        api_url: str,
        model: str,
        system: str | None = None,
        options: dict[str, Any] | None = None,
        key: str = "",
    ) -> None:
        if not api_url:
            raise NoModel("proxyd has not said where it listens; see 'meshctl status'")
        self.api_url = api_url
        self.model = model
        self._options = {name: value for name, value in (options or {}).items() if value is not None}
        self._key = key or _own_token(node)
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._system)

    def reset(self) -> None:
        self._messages = list(self._system)

    def ask(self, text: str, *, show: bool) -> tuple[str, dict[str, Any]]:
        """The whole answer and its usage; with ``show`` it is printed as it comes.

        Raises: RequestRefused, HttpFailed.
        """
        self._messages.append({"role": "user", "content": text})
        body = {
            "model": self.model,
            "messages": self._messages,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        started = time.monotonic()
        try:
            for event in chat_events(self.api_url, body, self._key):
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    piece = (choice.get("delta") or {}).get("content") or ""
                    pieces.append(piece)
                    if show and piece:
                        click.echo(clean(piece), nl=False)
                        sys.stdout.flush()
        except KeyboardInterrupt:
            if not show:
                raise
            click.echo(" …", nl=False)
        finally:
            if show:
                click.echo()
            if not pieces:
                self._messages.pop()
        answer = "".join(pieces)
        if pieces:
            self._messages.append({"role": "assistant", "content": answer})
        return answer, {**usage, "seconds": round(time.monotonic() - started, 3)}


def _own_token(node: Node) -> str:
    """This node's own token opens its API even where clients need keys."""
    if not node.paths.keys_file.exists():
        return ""
    try:
        return node.paths.console_token_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def converse(talk: Talk, message: str | None, as_json: bool) -> None:
    """One answer for ``message`` or for what comes through a pipe, else a conversation."""
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read()
    if message is not None:
        if not message.strip():
            raise click.UsageError("the message is empty; give one with -m or through a pipe")
        answer, usage = talk.ask(message, show=not as_json)
        if as_json:
            print_json({"model": talk.model, "answer": answer, "usage": usage})
        return
    if as_json:
        raise click.UsageError("--json needs one message: use -m TEXT or a pipe")
    _interactive(talk)


def _interactive(talk: Talk) -> None:
    try:
        import readline  # noqa: F401  (line editing and history for input())
    except ImportError:
        pass
    progress(f"{talk.model} at {talk.api_url}/v1. {HELP_TEXT}")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if text in ("/exit", "/quit", "/bye"):
            return
        if text == "/reset":
            talk.reset()
            progress("The conversation is forgotten.")
        elif text in ("/help", "/?"):
            progress(HELP_TEXT)
        elif text:
            try:
                talk.ask(text, show=True)
            except MeshError as error:
                fail(error.code, error.detail, as_json=False)
