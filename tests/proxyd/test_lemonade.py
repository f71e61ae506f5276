"""Names and shapes as Lemonade Server's API documents give them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.proxyd.lemonade import (
    Activity,
    SystemFacts,
    activity_here,
    complete,
    health,
    model_entry,
    models_list,
    progress,
    query_flag,
    shown_checkpoint,
    stats,
    system_info,
)
from services.proxyd.local_view import LocalView
from services.proxyd.requests_log import RequestRecord, RequestsLog
from services.proxyd.usage import Usage
from shared.ids import ModelName, RequestId, SlotId
from shared.messages.downloads import DownloadChanged, RegisteredModel, RegistryChanged
from shared.messages.models import DeviceChanged, InventoryChanged, LimitsChanged, LocalModel, SlotChanged
from shared.version import VERSION

READY = SlotChanged(
    slot_id=SlotId("s1"), model=ModelName("qwen"), type="llm", state="ready", reason="", origin="request", pid=4711,
    port=8123, context_tokens=8192, recipe="llamacpp", processors=("gpu", "npu"), pinned=True,
    checkpoint="org/qwen:Q4_K_M", backend="vulkan", engine_args=("--no-mmap", "--alias", "my model"),
    state_age_seconds=10, last_use_age_seconds=4,
)  # fmt: skip
QWEN = LocalModel(
    name=ModelName("qwen"), type="llm", path="/home/someone/models/qwen.gguf", file_size_bytes=379_000_000,
    labels=("reasoning",), checkpoint="org/qwen:Q4_K_M", trained_context_tokens=40960,
)  # fmt: skip
FOUND = LocalModel(name=ModelName("found"), type="embedding", path="/models/found.gguf", file_size_bytes=0)
CATALOG = (
    RegisteredModel(name=ModelName("qwen"), checkpoint="org/qwen:Q4_K_M", labels=("reasoning", "hot"), downloaded=True),
    RegisteredModel(name=ModelName("large"), checkpoint="org/large:Q4", size_bytes=70_000_000_000),
    RegisteredModel(name=ModelName("user.mine"), checkpoint="me/mine", recipe="whispercpp", type="audio", user=True),
)


def view(*messages: object) -> LocalView:
    made = LocalView()
    for message in messages:
        made.apply(message, now=1000.0)
    return made


def record(**fields: object) -> RequestRecord:
    made = RequestRecord(request_id=RequestId("r1"), route="/v1/chat/completions", started=100.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_health_of_a_loaded_model() -> None:
    """docs/spec/lemonade.md 8, 9, 10."""
    shown = health(view(READY, LimitsChanged(max_loaded_models=(2, 1, 1, -1, 1))), {})
    assert shown["all_models_loaded"] == [
        {
            "model_name": "qwen",
            "checkpoint": "org/qwen:Q4_K_M",
            "last_use": 996.0,
            "type": "llm",
            "device": "gpu npu",
            "backend_url": "http://127.0.0.1:8123/v1",
            "recipe": "llamacpp",
            "recipe_options": {
                "ctx_size": 8192,
                "llamacpp_backend": "vulkan",
                "llamacpp_args": "--no-mmap --alias 'my model'",
            },
            "pid": 4711,
            "status": "ready",
            "loaded": True,
            "pinned": True,
            "is_busy": False,
            "is_streaming": False,
        }
    ]
    assert shown["max_models"] == {"llm": 2, "embedding": 1, "reranking": 1, "audio": -1, "image": 1}
    assert (shown["status"], shown["version"]) == ("ok", VERSION)
    assert (shown["model_loaded"], shown["checkpoint_loaded"]) == ("qwen", "org/qwen:Q4_K_M")
    assert shown["pinned_models"]["llm"] == 1


def test_health_before_anybody_has_said_anything() -> None:
    shown = health(view(), {})
    assert (shown["status"], shown["model_loaded"], shown["checkpoint_loaded"]) == ("ok", None, None)
    assert (shown["all_models_loaded"], set(shown["max_models"].values())) == ([], {None})


def test_the_llm_loaded_last_else_the_model_loaded_last() -> None:
    """docs/spec/lemonade.md 8: `model_loaded` is the llm loaded last, else the model loaded last, else null."""
    embedding = replace(READY, slot_id=SlotId("s2"), model=ModelName("e"), type="embedding", state_age_seconds=1)
    reranking = replace(embedding, slot_id=SlotId("s3"), model=ModelName("r"), type="reranking", state_age_seconds=2)
    assert health(view(READY, embedding), {})["model_loaded"] == "qwen"
    assert health(view(embedding, reranking), {})["model_loaded"] == "e"


def test_a_model_that_loads_is_shown_apart_with_its_reason() -> None:
    """docs/spec/lemonade.md 8."""
    shown = health(view(replace(READY, state="queued", reason="waits for busy models")), {})
    assert shown["all_models_loaded"] == []
    assert shown["models_loading"] == [
        {"model_name": "qwen", "type": "llm", "status": "queued", "reason": "waits for busy models"}
    ]


def test_busy_by_either_word_and_the_later_use() -> None:
    """docs/spec/lemonade.md 9."""
    name = ModelName("qwen")
    assert health(view(replace(READY, in_use=1)), {})["all_models_loaded"][0]["is_busy"]
    assert health(view(replace(READY, waiting=1)), {})["all_models_loaded"][0]["is_busy"]
    shown = health(view(READY), {name: Activity(True, True, 999.0)})["all_models_loaded"][0]
    assert (shown["is_busy"], shown["is_streaming"], shown["last_use"]) == (True, True, 999.0)
    assert health(view(READY), {name: Activity(last_use=5.0)})["all_models_loaded"][0]["last_use"] == 996.0


def test_activity_of_this_nodes_own_engines() -> None:
    model = ModelName("m")
    running = record(model=model, attempts=1, streaming=True, first_byte_seconds=0.1)
    ended = record(model=ModelName("n"), attempts=1, total_seconds=2.0)
    others = [record(model=ModelName("far"), attempts=1, elsewhere=True), record(model=ModelName("waits")), record()]
    found = activity_here([running, *others], [ended], now=110.0, unix_now=5000.0)
    assert found == {model: Activity(True, True, 5000.0), ModelName("n"): Activity(last_use=4992.0)}


def test_stats_are_one_record() -> None:
    """docs/spec/lemonade.md 11: `input_tokens` are those that were computed."""
    streamed = record(model=ModelName("m"), streaming=True, first_byte_seconds=0.25)
    streamed.answered(200, Usage(100, 20, 33.5, 90, 0.1))
    assert stats(streamed, 7) == {
        "time_to_first_token": 0.25,
        "tokens_per_second": 33.5,
        "input_tokens": 10,
        "output_tokens": 20,
        "prompt_tokens": 100,
        "cache_tokens": 90,
        "model_name": "m",
        "request_id": "r1",
        "request_count_total": 7,
    }


def test_what_the_engine_did_not_say_is_null() -> None:
    whole = record(first_byte_seconds=9.0, queue_seconds=2.0)
    whole.answered(200, Usage(prompt_tokens=3))
    shown = stats(whole, 1)
    assert (shown["time_to_first_token"], shown["input_tokens"], shown["output_tokens"]) == (None, 3, None)
    whole.answered(200, Usage(3, 4, 5.0, 0, 0.5))
    assert stats(whole, 1)["time_to_first_token"] == 2.5, "the wait and the prompt: the answer came in one piece"
    assert set(stats(None, 0).values()) == {None, 0}


def test_the_newest_answered_request_is_kept_whatever_follows() -> None:
    """docs/spec/lemonade.md 11: no other request and no unload changes it."""
    log = RequestsLog(recent_limit=2)
    good = record()
    log.begin(good)
    good.answered(200, Usage(1, 2, 3.0))
    log.finish(good)
    for outcome in ("refused", "client_gone", "engine_failed", "error"):
        other = record(outcome=outcome)
        log.begin(other)
        log.finish(other)
    assert log.latest_answered is good


def test_models_on_the_disk_and_the_whole_registry() -> None:
    """docs/spec/lemonade.md 3."""
    local = view(InventoryChanged(models=(QWEN, FOUND)), RegistryChanged(models=CATALOG))
    assert [entry["id"] for entry in models_list(local, show_all=False)["data"]] == ["found", "qwen"]
    shown = {entry["id"]: entry for entry in models_list(local, show_all=True)["data"]}
    assert set(shown) == {"found", "qwen", "large", "user.mine"}
    assert shown["qwen"] == {
        "id": "qwen",
        "object": "model",
        "created": 0,
        "owned_by": "lemonade",
        "checkpoint": "org/qwen:Q4_K_M",
        "recipe": "llamacpp",
        "type": "llm",
        "labels": ["reasoning", "hot"],
        "downloaded": True,
        "suggested": True,
        "size": 0.379,
        "size_bytes": 379_000_000,
        "recipe_options": {},
        "max_context_window": 40960,
    }
    assert (shown["large"]["downloaded"], shown["large"]["suggested"], shown["large"]["size"]) == (False, True, 70.0)
    assert (shown["found"]["suggested"], "size" in shown["found"]) == (False, False)
    assert shown["found"]["checkpoint"] == "found.gguf"
    assert (shown["user.mine"]["suggested"], shown["user.mine"]["recipe"]) == (False, "whispercpp")
    assert model_entry(local, "large") == shown["large"]
    assert model_entry(local, "qwen.gguf") == shown["qwen"]
    assert model_entry(local, "nothing") is None


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("org/repo:Q4", "org/repo:Q4"),
        ("/home/someone/models/qwen.gguf", "qwen.gguf"),
        ("~/models/qwen.gguf", "qwen.gguf"),
        ("https://hub.example/a/b.gguf", "https://hub.example/a/b.gguf"),
        ("", ""),
    ],
)
def test_of_a_path_only_the_name_is_shown(given: str, shown: str) -> None:
    """docs/spec/lemonade.md 12: of a path only the name is shown."""
    assert shown_checkpoint(given) == shown
    text = str(health(view(replace(READY, checkpoint="/home/someone/qwen.gguf")), {}))
    assert "/home/someone" not in text


def test_system_info_says_what_is_known_and_what_is_not() -> None:
    """docs/spec/lemonade.md 13."""
    nothing = system_info(view(), SystemFacts())
    assert nothing["Processor"] == nothing["Physical Memory"] == nothing["OS Version"] == "unknown"
    assert nothing["devices"]["gpu"]["available"] is None
    assert nothing["devices"]["npu"]["available"] is None
    assert nothing["recipes"]["llamacpp"]["backends"]["default"]["state"] == "unknown"
    device = DeviceChanged(
        device="NVIDIA H200", vram_bytes=1, total_bytes=139 * 1024**3, reserve_bytes=0, engine="llama.cpp b6000",
        npus=("AMD XDNA2",), backends={"cuda": "", "rocm": "no llama-server for it; put one in ~/rocm"},
        recipes={"flm": "", "whispercpp": "no whisper-server on PATH; install whisper.cpp"},
    )  # fmt: skip
    facts = SystemFacts(
        os_version="Linux-6.1", processor="AMD EPYC", architecture="x86_64", cores=8, threads=16,
        memory_bytes=32 * 1024**3,
    )  # fmt: skip
    known = system_info(view(device, replace(READY, recipe="flm", processors=("npu",))), facts)
    assert (known["Processor"], known["Physical Memory"]) == ("AMD EPYC", "32.0 GB")
    assert known["devices"]["cpu"] == {
        "name": "AMD EPYC", "cores": 8, "threads": 16, "available": True, "family": "x86_64",
    }  # fmt: skip
    assert known["devices"]["nvidia_gpu"] == [{"name": "NVIDIA H200", "available": True, "vram_gb": 139.0}]
    assert known["devices"]["amd_npu"] == {"name": "AMD XDNA2", "available": True, "reason": "qwen runs on it"}
    builds = known["recipes"]["llamacpp"]["backends"]
    assert (builds["default"]["state"], builds["default"]["version"]) == ("installed", "llama.cpp b6000")
    assert builds["cuda"]["devices"] == ["cpu", "gpu"]
    assert (builds["rocm"]["state"], builds["rocm"]["devices"]) == ("installable", [])
    assert "~/rocm" in builds["rocm"]["message"]
    assert known["recipes"]["flm"]["backends"]["default"]["devices"] == ["npu"]
    assert "PATH" in known["recipes"]["whispercpp"]["backends"]["default"]["message"]


def test_a_machine_without_engine_gpu_or_npu() -> None:
    device = DeviceChanged(
        device="cpu", vram_bytes=1, total_bytes=1, reserve_bytes=0, engine="", engine_reason="no llama-server; get one"
    )
    shown = system_info(view(device), SystemFacts())
    assert shown["devices"]["gpu"]["available"] is False
    assert shown["devices"]["npu"]["available"] is False
    backend = shown["recipes"]["llamacpp"]["backends"]["default"]
    assert (backend["state"], backend["message"]) == ("installable", "no llama-server; get one")


def test_events_of_a_download() -> None:
    """docs/spec/lemonade.md 19."""
    running = DownloadChanged(
        model=ModelName("m"), checkpoint="o/r:Q4", state="downloading", reason="", file="a.gguf", file_index=1,
        file_count=2, bytes_done=1073741824, bytes_total=2684354560, bytes_per_second=12.6,
    )  # fmt: skip
    shown = progress(running)
    documented = ("file", "file_index", "total_files", "bytes_downloaded", "bytes_total", "percent")
    assert tuple(shown[key] for key in documented) == ("a.gguf", 1, 2, 1073741824, 2684354560, 40)
    assert progress(replace(running, bytes_total=0))["percent"] == 0
    assert (complete("m", running)["percent"], complete("m", running)["total_files"]) == (100, 2)
    assert complete("m", None)["percent"] == 100


@pytest.mark.parametrize(
    ("query", "flag"),
    [(b"", False), (b"show_all=true", True), (b"a=1&show_all=True", True), (b"show_all=false", False),
     (b"show_all", False), (b"show_all=1", True), (b"\xff=%ff&show_all=true", True)],
)  # fmt: skip
def test_flags_of_a_query(query: bytes, flag: bool) -> None:
    assert query_flag(query, "show_all") is flag


def test_names_are_the_meshs_by_which_inference_goes() -> None:
    """docs/spec/lemonade.md 24: where another node has a different file of the same name."""
    here, there = ModelName("qwen"), ModelName("qwen~1f2e")
    made = LocalView(lambda name: there if name == here else name, lambda name: here if name == there else name)
    for message in (InventoryChanged(models=(QWEN,)), READY):
        made.apply(message, now=0)
    assert health(made, {})["model_loaded"] == there
    assert health(made, {})["all_models_loaded"][0]["model_name"] == there
    assert [entry["id"] for entry in models_list(made, show_all=False)["data"]] == [there]
    for name in (there, here):
        entry = model_entry(made, name)
        assert entry is not None
        assert entry["id"] == there
    assert made.nearest("qwen~1") == (there,)
