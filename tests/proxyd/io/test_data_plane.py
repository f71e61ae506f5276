"""What all requests share: ids, headers, the sweep."""

from __future__ import annotations

from services.proxyd.io.data_plane import DataPlane, SilenceWatch, target_of
from services.proxyd.io.upstream import UpstreamPool
from services.proxyd.mesh_view import MeshView
from services.proxyd.routes import InferenceRoute, find_route
from shared.config import ApiSection
from tests.waiting import run_async


def plane(node_name: str = "attic") -> DataPlane:
    async def make() -> DataPlane:
        return DataPlane(
            view=MeshView(),
            leases=None,  # type: ignore[arg-type]
            tunnels=None,  # type: ignore[arg-type]
            place=None,  # type: ignore[arg-type]
            config=ApiSection(),
            node_name=node_name,
            pool=UpstreamPool(),
            cors=lambda _headers: [],
        )

    return run_async(make())


def test_a_node_name_is_harmless_in_a_header() -> None:
    assert plane("Büro\r\nX-Evil: 1").node_header == b"B?ro??X-Evil: 1"


def test_request_ids_are_the_clients_or_unique() -> None:
    shared = plane()
    assert shared.request_id(b"mine") == "mine"
    made = {shared.request_id(b"") for _ in range(100)} | {plane().request_id(b"") for _ in range(10)}
    assert len(made) == 110
    assert all(len(request_id) == 24 for request_id in made)


def test_engine_addresses() -> None:
    assert plane().address("http://127.0.0.1:8080") == (("127.0.0.1", 8080), b"127.0.0.1:8080")
    assert plane().address("http://[::1]:8080") == (("::1", 8080), b"[::1]:8080")


def test_the_engine_sees_the_v1_path_and_the_query_as_the_client_wrote_it() -> None:
    """docs/spec/lemonade.md 1: the engine always sees the `/v1` path."""
    route = find_route("POST", "/api/v0/chat/completions")
    assert isinstance(route, InferenceRoute)
    assert target_of(route, {"query_string": b""}) == b"/v1/chat/completions"
    assert target_of(route, {"query_string": b"a=%20"}) == b"/v1/chat/completions?a=%20"


def test_each_spell_of_silence_is_told_once() -> None:
    told: list[str] = []

    class Leases:
        def suspect(self, _lease: object, detail: str, *, broken: bool) -> None:
            assert not broken
            told.append(detail)

    watch = SilenceWatch()
    for now in (1.0, 2.0, 2.1, 3.0):
        watch.look(Leases(), None, 0.0, now)  # type: ignore[arg-type]
    assert told == ["no byte for 2.0 s"]
    watch.look(Leases(), None, 3.0, 3.5)  # type: ignore[arg-type]
    watch.look(Leases(), None, 3.0, 5.5)  # type: ignore[arg-type]
    assert len(told) == 2
