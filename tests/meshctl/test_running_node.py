"""meshctl against one real node: real supervisord, five real daemons, real engines."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shared.ids import DAEMONS
from shared.paths import REPOSITORY
from shared.version import VERSION
from tests.engines import tiny_models
from tests.processes.node import Node, private_home, processes_of, wait_for

BINARIES = Path(sys.executable).parent
MODEL, OTHER, GUIDE = "tiny-a", "tiny-b", "meshd-guide"
CONFIG = """\
# kept by its owner
[models]
folders = ["{folder}"]  # here
max_loaded_models = 2
"""


class StartedNode(Node):
    """``first`` is what the ``up`` that started it printed."""

    first: str


@pytest.fixture(scope="module")
def node() -> Iterator[StartedNode]:
    with private_home() as home:
        folder = home / "mine"
        folder.mkdir()
        tiny_models.write_llm(folder / f"{MODEL}.gguf", seed=1, name=MODEL)
        tiny_models.write_llm(folder / f"{OTHER}.gguf", seed=2, name=OTHER)
        (folder / "broken.gguf").write_bytes(b"not a model")
        (home / "mesh.toml").write_text(CONFIG.format(folder=folder))
        node = StartedNode(home)
        try:
            node.first = node.meshctl("up", "--model", MODEL).stdout
            yield node
        except BaseException:
            print(node.logs())
            raise
        finally:
            node.down()


def pids(node: Node) -> dict[str, int]:
    return {daemon["name"]: daemon["pid"] for daemon in node.status()["daemons"]}


def on_a_terminal(node: Node, words: list[str], typed: str) -> str:
    """What the command prints on a terminal while a person types ``typed``; control sequences and all."""
    master, slave = pty.openpty()
    command = [str(REPOSITORY / "bin" / "meshctl"), *words]
    environment = {**node.env(), "TERM": "xterm-256color", "COLUMNS": "100"}
    with subprocess.Popen(command, env=environment, stdin=slave, stdout=slave, stderr=slave, close_fds=True) as ran:
        os.close(slave)
        os.write(master, typed.encode())
        said = b""
        with contextlib.suppress(OSError):  # Linux ends a terminal without writers with EIO.
            while piece := os.read(master, 65_536):
                said += piece
        os.close(master)
        assert ran.wait(60) == 0, said
    return said.decode()


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def guide_answer(id: str) -> tuple[str, str]:
    """(question, answer) of the guide's canonical entry."""
    entries = tomllib.loads((REPOSITORY / "docs/guide/questions.toml").read_text())["question"]
    entry = next(entry for entry in entries if entry["id"] == id)
    return entry["ask"][0], entry["answer"]


def test_up_prints_the_endpoint_with_a_curl_that_works_and_then_what_is_loading(node: StartedNode) -> None:
    lines = node.first.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"{node.api}/v1  try: curl ")
    answer = subprocess.run(
        ["sh", "-c", lines[0].partition("try: ")[2] + " -sS"], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"]
    assert MODEL in lines[1]


def test_up_keeps_what_the_owner_wrote(node: Node) -> None:
    text = (node.home / "mesh.toml").read_text()
    assert text.startswith("# kept by its owner\n[models]\n")
    assert f'serve = ["{MODEL}"]' in text
    assert "# here" in text


def test_up_again_changes_nothing_and_a_changed_option_is_applied_without_a_restart(node: Node) -> None:
    before = pids(node)
    again = node.meshctl("up")
    assert "up already" in again.stderr
    changed = json.loads(node.meshctl("up", "--max-loaded-models", "3", "--json").stdout)
    assert changed["already_running"]
    assert changed["changed"] == ["models.max_loaded_models"]
    assert pids(node) == before


def test_status_has_everything_a_script_needs(node: Node) -> None:
    wait_for(lambda: node.status()["overall"] == "ready", 30, "a ready model")
    status = node.status()
    assert [daemon["name"] for daemon in status["daemons"]] == list(DAEMONS)
    assert all(daemon["pid"] and daemon["state"] == "running" for daemon in status["daemons"])
    assert status["addresses"]["api"] == f"http://127.0.0.1:{status['ports']['api']}"
    assert status["addresses"]["console"] == f"http://127.0.0.1:{status['ports']['console']}"
    assert all(status["node"]["peer_id"] in address for address in status["addresses"]["mesh"])
    assert status["ports"]["mesh"] > 0
    assert status["node"]["engine"]
    assert status["node"]["vram_bytes"] > 0
    models = {model["name"]: model for model in status["models"]}
    assert models[MODEL]["status"] == "ready"
    assert models[MODEL]["hosts"] == [status["node"]["name"]]
    assert models[OTHER]["status"] == "unloaded"
    assert models[GUIDE]["builtin"]
    assert [item["path"] for item in status["skipped"]] == [str(node.home / "mine" / "broken.gguf")]
    assert status["skipped"][0]["reason"]
    assert status["hints"]


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_the_screen_fits_the_terminal_and_has_no_colour_in_a_pipe(node: Node, columns: str) -> None:
    narrow = Node(node.home, environment={"COLUMNS": columns})
    text = narrow.meshctl("status").stdout
    assert "\x1b" not in text
    assert all(name in text for name in DAEMONS)
    assert max(len(line) for line in text.splitlines()) <= int(columns)


def test_watch_shows_it_again_and_again(node: Node) -> None:
    command = [str(REPOSITORY / "bin" / "meshctl"), "status", "--watch", "--json"]
    with subprocess.Popen(command, env=node.env(), stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        seen = 0
        for line in ran.stdout:
            seen += line.startswith('  "overall"')
            if seen == 2:
                break
        ran.send_signal(signal.SIGINT)
        assert ran.wait(10) == 130


def test_a_killed_daemon_is_shown_and_then_healed(node: Node) -> None:
    old = node.pid("gossipd")
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: node.healed() and node.pid("gossipd") != old, 15, "gossipd is back")
    row = next(daemon for daemon in node.status()["daemons"] if daemon["name"] == "gossipd")
    assert row["restarts"] >= 1


def test_a_stopped_daemon_is_shown_with_the_reason(node: Node) -> None:
    supervisorctl = [str(BINARIES / "supervisorctl"), "-c", str(node.home / "supervisord.conf")]
    subprocess.run([*supervisorctl, "stop", "electiond"], check=True, capture_output=True, timeout=30)
    try:
        status = node.status()
        row = next(daemon for daemon in status["daemons"] if daemon["name"] == "electiond")
        assert (row["state"], status["overall"]) == ("stopped", "degraded")
        assert "electiond" in status["summary"]
        text = node.meshctl("status").stdout
        assert "degraded" in text
    finally:
        subprocess.run([*supervisorctl, "start", "electiond"], check=True, capture_output=True, timeout=30)
    wait_for(node.healed, 15, "electiond answers again")


def test_restart_of_one_daemon_leaves_the_others_alone(node: Node) -> None:
    before = pids(node)
    rows = json.loads(node.meshctl("restart", "launcherd", "--json").stdout)
    assert rows[0]["old_pid"] == before["launcherd"] != rows[0]["pid"]
    after = pids(node)
    assert {name for name in DAEMONS if before[name] != after[name]} == {"launcherd"}
    wait_for(lambda: node.status()["overall"] == "ready", 20, "ready again")


def test_load_ps_unload(node: Node) -> None:
    loaded = json.loads(node.meshctl("load", OTHER, "--json").stdout)
    assert (loaded["model"], loaded["already"]) == (OTHER, False)
    assert "ready already" in node.meshctl("load", OTHER).stdout
    names = {model["name"] for model in json.loads(node.meshctl("ps", "--json").stdout)}
    assert {MODEL, OTHER} <= names
    text = node.meshctl("ps").stdout
    assert text.splitlines()[0].split() == ["MODEL", "NODES", "SIZE", "SLOTS", "BUSY", "TOK/S", "USED", "UNTIL"]
    assert OTHER in text
    node.chat(OTHER, "hello", max_tokens=8)
    row = next(model for model in json.loads(node.meshctl("ps", "--json").stdout) if model["name"] == OTHER)
    assert row["tokens_per_second"] > 0
    node.meshctl("unload", OTHER)
    wait_for(
        lambda: OTHER not in {model["name"] for model in json.loads(node.meshctl("ps", "--json").stdout)},
        10,
        "unloaded",
    )


def test_load_of_what_is_not_there(node: Node) -> None:
    ran = node.meshctl("load", "no-such-model", check=False)
    assert ran.returncode == 1
    assert "no-such-model" in ran.stderr
    assert ran.stderr.count("meshctl:") == 1
    ran = node.meshctl("load", "no-such-model", "--json", check=False)
    assert json.loads(ran.stdout)["error"]["code"] == "model_not_found"


def test_load_of_a_broken_file(node: Node) -> None:
    ran = node.meshctl("load", "broken", check=False)
    assert ran.returncode == 1
    assert "broken" in ran.stderr


def test_load_of_a_file_that_is_gone(node: Node) -> None:
    path = tiny_models.write_llm(node.home / "mine" / "vanishing.gguf", seed=3, name="vanishing")
    node.meshctl("models", "list", "--rescan")
    wait_for(lambda: "vanishing" in {model["name"] for model in node.status()["models"]}, 10, "the model is known")
    path.unlink()
    ran = node.meshctl("load", "vanishing", check=False)
    assert ran.returncode == 1
    assert "vanishing" in ran.stderr
    assert MODEL in {model["name"] for model in json.loads(node.meshctl("ps", "--json").stdout)}, "nothing was evicted"


def test_models_list_and_show(node: Node) -> None:
    listed = json.loads(node.meshctl("models", "list", "--json").stdout)
    assert {MODEL, OTHER, GUIDE} <= {model["name"] for model in listed["models"]}
    text = node.meshctl("models").stdout
    assert "skipped" in text
    assert "broken.gguf" in text
    shown = json.loads(node.meshctl("models", "show", MODEL, "--json").stdout)
    assert shown["path"] == str(node.home / "mine" / f"{MODEL}.gguf")
    ran = node.meshctl("models", "show", "tiny-q", check=False)
    assert ran.returncode == 1
    assert "did you mean tiny-" in ran.stderr


def test_rm_never_deletes_what_meshd_did_not_download(node: Node) -> None:
    ran = node.meshctl("models", "rm", MODEL, "-y", check=False)
    path = node.home / "mine" / f"{MODEL}.gguf"
    assert ran.returncode == 1
    assert str(path) in ran.stderr
    assert path.exists()


def test_rm_deletes_every_part_of_a_download(node: Node) -> None:
    downloads = node.home / "models"
    downloads.mkdir(exist_ok=True)
    whole = tiny_models.write_llm(node.home / "whole.gguf", seed=9, name="gone")
    parts = tiny_models.write_parts(downloads, "gone", whole)
    node.meshctl("models", "list", "--rescan")
    wait_for(lambda: "gone" in {model["name"] for model in node.status()["models"]}, 10, "the download is known")
    done = json.loads(node.meshctl("models", "rm", "gone", "-y", "--json").stdout)
    assert "Deleted gone" in done["detail"]
    assert not any(path.exists() for path in parts)
    wait_for(lambda: "gone" not in {model["name"] for model in node.status()["models"]}, 10, "the model is forgotten")


def test_chat_prints_the_guides_exact_answer(node: Node) -> None:
    question, answer = guide_answer("add-model")
    ran = node.meshctl("chat", GUIDE, "--temperature", "0", "-m", question)
    assert ran.stdout == f"{answer}\n"


def test_chat_reads_a_pipe_and_speaks_json(node: Node) -> None:
    question, answer = guide_answer("what-is-meshd")
    ran = subprocess.run(
        [str(REPOSITORY / "bin" / "meshctl"), "chat", GUIDE, "--temperature", "0", "--json"],
        input=question, env=node.env(), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    said = json.loads(ran.stdout)
    assert (said["model"], said["answer"]) == (GUIDE, answer)
    assert said["usage"]["completion_tokens"] > 0


def test_quickstart_asks_what_the_guide_knows() -> None:
    question, _ = guide_answer("add-model")
    assert f'question="{question}"' in (REPOSITORY / "bin" / "quickstart").read_text()


def test_a_conversation_on_a_terminal(node: Node) -> None:
    question, answer = guide_answer("hello")
    said = on_a_terminal(node, ["chat", GUIDE, "--temperature", "0"], f"{question}\n/reset\n{question}\n/exit\n")
    assert said.count(answer) == 2
    assert "/exit" in said


def test_the_screen_has_colour_on_a_terminal(node: Node) -> None:
    assert "\x1b[32m" in on_a_terminal(node, ["status"], "")


def test_run_loads_and_answers(node: Node) -> None:
    question, _ = guide_answer("hello")
    node.meshctl("unload", GUIDE)
    ran = node.meshctl("run", GUIDE, question, "--json")
    said = json.loads(ran.stdout)
    assert (said["model"], bool(said["answer"])) == (GUIDE, True)


def test_chat_with_an_unknown_model(node: Node) -> None:
    ran = node.meshctl("chat", "no-such-model", "-m", "hi", check=False)
    assert ran.returncode == 1
    assert "no-such-model" in ran.stderr


def test_why_speaks_in_sentences_and_in_causal_order(node: Node) -> None:
    said = json.loads(node.meshctl("why", MODEL, "--json").stdout)
    daemons = list(said["sentences"])
    assert {"electiond", "launcherd"} <= set(daemons)
    assert daemons.index("electiond") < daemons.index("launcherd")
    text = node.meshctl("why", MODEL).stdout
    assert MODEL in text


def test_why_of_a_node(node: Node) -> None:
    peer_id = node.status()["node"]["peer_id"]
    assert peer_id in node.meshctl("why", peer_id).stdout


def test_why_of_nothing_known(node: Node) -> None:
    ran = node.meshctl("why", "tiny-z", check=False)
    assert ran.returncode == 1
    assert "did you mean tiny-" in ran.stderr


@pytest.mark.parametrize("daemon", DAEMONS)
def test_every_daemon_tells_its_story(node: Node, daemon: str) -> None:
    assert isinstance(json.loads(node.meshctl("story", daemon, "--json").stdout), list)
    assert node.meshctl("story", daemon).stdout


def test_peers_are_this_node(node: Node) -> None:
    (peer,) = json.loads(node.meshctl("peers", "--json").stdout)
    assert peer["is_self"]
    assert "(this node)" in node.meshctl("peers").stdout


def test_version_of_every_daemon(node: Node) -> None:
    said = json.loads(node.meshctl("version", "--json").stdout)
    assert said["daemons"] == dict.fromkeys(DAEMONS, VERSION)
    assert said["skew"] == []
    assert said["engine"], "the guide model says that the engine's version is told"
    assert said["engine"] in node.meshctl("version").stdout


def test_logs_of_daemons_and_engines(node: Node) -> None:
    assert "gossipd ready" in node.meshctl("logs", "gossipd", "-n", "1000").stdout
    assert node.meshctl("logs").stdout
    assert node.meshctl("logs", "engine", MODEL).stdout


def test_doctor_finds_a_healthy_node(node: Node) -> None:
    said = json.loads(node.meshctl("doctor", "--json").stdout)
    assert said["ok"], said
    assert next(check for check in said["checks"] if check["name"] == "node")["level"] == "ok"


def test_settings_change_while_models_stay_loaded(node: Node) -> None:
    def engine_pid() -> int:
        return int(next(model["here"]["pid"] for model in node.status()["models"] if model["name"] == MODEL))

    wait_for(lambda: node.status()["overall"] == "ready", 20, "ready")
    node.meshctl("load", MODEL)
    before = engine_pid()
    said = json.loads(node.meshctl("config", "set", "models.idle_unload_minutes", "90", "--json").stdout)
    assert said["changed"] == ["models.idle_unload_minutes"]
    assert node.meshctl("config", "show", "models.idle_unload_minutes").stdout == "90.0\n"
    assert engine_pid() == before
    node.meshctl("config", "reload")
    assert engine_pid() == before


def test_keys_open_and_close_the_api(node: Node) -> None:
    made = json.loads(node.meshctl("keys", "create", "--name", "laptop", "--json").stdout)
    try:
        wait_for(lambda: node.request("GET", "/v1/models").status == 401, 5, "a request without a key is refused")
        assert made["key"] not in node.meshctl("keys", "list").stdout
        assert "laptop" in node.meshctl("keys", "list").stdout
        assert node.meshctl("chat", GUIDE, "-m", "hello").stdout.strip(), "meshctl uses the node's own token"
    finally:
        node.meshctl("keys", "revoke", "laptop")
    wait_for(lambda: node.request("GET", "/v1/models").status == 200, 5, "no key is needed any more")


def test_down_leaves_nothing_and_says_so() -> None:
    with private_home() as home:
        node = Node(home)
        node.up()
        assert "none of its processes is left" in node.meshctl("down").stdout
        assert processes_of(home) == []
        assert node.meshctl("down").stdout == "This node was not running.\n"


def test_down_sweeps_after_supervisord_and_launcherd_were_killed() -> None:
    with private_home() as home:
        folder = home / "mine"
        folder.mkdir()
        tiny_models.write_llm(folder / f"{MODEL}.gguf", seed=1, name=MODEL)
        node = Node(home)
        try:
            node.up("--models-dir", str(folder))
            node.meshctl("load", MODEL)
            supervisord = json.loads((home / "run" / "supervisor.json").read_text())["pid"]
            victims = [node.pid("launcherd"), supervisord]
            engine = next(model["here"]["pid"] for model in node.status()["models"] if model["name"] == MODEL)
            os.kill(victims[1], signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victims[0], signal.SIGKILL)
            said = node.meshctl("down").stdout
            assert "none of its processes is left" in said
            assert not runs(engine)
            assert processes_of(home) == []
        except BaseException:
            print(node.logs())
            raise


def test_an_idle_node_says_so_and_a_load_makes_it_serve() -> None:
    with private_home() as home:
        node = Node(home)
        try:
            node.up()
            node.down()
            (home / "mesh.toml").unlink()
            shutil.rmtree(home / "state")
            supervisord = [str(BINARIES / "supervisord"), "-c", str(home / "supervisord.conf")]
            subprocess.run(supervisord, env=node.env(), cwd=home, check=True, capture_output=True, timeout=30)
            wait_for(lambda: node.meshctl("status", check=False).returncode == 0 and node.healed(), 20, "it is up")
            status = wait_for(lambda: (said := node.status())["overall"] == "idle" and said, 10, "it is idle")
            assert "mesh.toml" in status["summary"]
            assert "meshctl up --model" in status["hints"][0]
            ran = node.meshctl("load", GUIDE)
            assert f"Wrote {home / 'mesh.toml'}" in ran.stderr
            assert f"{GUIDE} is ready" in ran.stdout
            wait_for(lambda: node.status()["overall"] == "ready", 10, "the node is idle no more")
        finally:
            node.down()


def test_without_an_engine_the_node_runs_and_says_how_to_get_one() -> None:
    with private_home() as home:
        node = Node(home, environment={"MESH_ENGINE": "/nonexistent/llama-server"})
        try:
            started = node.meshctl("up")
            assert "/nonexistent/llama-server does not exist" in started.stderr
            assert "pip install xllamacpp" in started.stderr
            wait_for(lambda: node.status()["node"]["engine_reason"], 10, "launcherd says it has no engine")
            assert any("no engine" in hint for hint in node.status()["hints"])
            ran = node.meshctl("load", GUIDE, check=False)
            assert ran.returncode == 1
            assert "/nonexistent/llama-server" in ran.stderr
        finally:
            node.down()


def test_a_daemon_that_cannot_start_is_explained_by_up() -> None:
    """The reason is the daemon's own, out of its log."""
    with private_home() as home:
        node = Node(home)
        (home / "state").mkdir(parents=True)
        (home / "state" / "node_key.pem").mkdir()
        try:
            ran = node.meshctl("up", check=False)
            assert ran.returncode == 1
            assert "tunneld" in ran.stderr
            assert "node_key" in ran.stderr
            assert "meshctl logs tunneld" in ran.stderr
        finally:
            node.down()
