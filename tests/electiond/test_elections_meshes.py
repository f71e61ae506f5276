"""Several machines of electiond as one mesh: what follows from docs/spec/{allocation,election}.md for all of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.electiond.placements import MAX_ACTIVE
from shared.ids import PeerId
from shared.messages.models import LocalModel, ModelPlaced
from tests.electiond.meshes import Mesh, MeshNode
from tests.electiond.nodes import GB, local, name


def node(
    peer: str, vram_bytes: int, *models: LocalModel, client: bool = False, broken: tuple[str, ...] = ()
) -> MeshNode:
    return MeshNode(PeerId(peer), vram_bytes, models, client=client, broken=broken)


def test_a_node_that_is_alone_waits_for_nothing() -> None:
    mesh = Mesh()
    mesh.join(node("a", 8 * GB, local("m")))
    assert mesh.nodes[PeerId("a")].loads == [(0.0, "m")]


def test_ten_equal_nodes_that_start_together_take_ten_models() -> None:
    mesh = Mesh()
    files = [local(f"m{at}") for at in range(10)]
    mesh.join(*(node(f"p{at}", 8 * GB, *files) for at in range(10)))
    mesh.run(60)
    assert set(mesh.served()) == {f"m{at}" for at in range(10)}
    assert [len(one.loads) for one in mesh.nodes.values()] == [1] * 10


def test_ten_joiners_of_which_one_takes_the_only_unserved_model_at_first() -> None:
    """TRAPS 14: all see the same model; the others come after it, and only until the group is full."""
    mesh = Mesh()
    files = [local("old"), local("new")]
    mesh.join(node("a", 8 * GB, files[0]))
    mesh.run(20)
    mesh.join(*(node(f"p{at}", 8 * GB, *files) for at in range(10)))
    mesh.run(60)
    starts = sorted(load for one in mesh.nodes.values() for load in one.loads)[1:]
    assert starts[0][1] == "new"
    assert sum(1 for at, _ in starts if at - starts[0][0] < 2) == 1
    assert sum(map(len, mesh.served().values())) == MAX_ACTIVE
    standby = next(one for one in mesh.nodes.values() if not one.loads)
    assert "stands by" in standby.core.assigned.idle_reason


def test_a_host_dies_and_an_idle_node_with_the_file_takes_over() -> None:
    mesh = Mesh()
    for one in (
        node("a", 8 * GB, local("big", 4 * GB)),
        node("b", 8 * GB, local("small"), local("big", 4 * GB), broken=("big",)),
    ):
        mesh.join(one)
        mesh.run(20)
    mesh.join(node("c", 8 * GB, local("big", 4 * GB)))
    mesh.run(1)
    assert mesh.served() == {"big": ["a"], "small": ["b"]}
    mesh.kill("a", after=1)
    mesh.run(10)
    assert mesh.served() == {"big": ["c"], "small": ["b"]}


def test_a_client_serves_nothing_and_asks_the_others() -> None:
    mesh = Mesh()
    mesh.join(node("a", 8 * GB, local("x")), node("c", 80 * GB, local("x"), local("y"), client=True))
    mesh.run(30)
    assert mesh.served() == {"x": ["a"]}
    reply = mesh.ask("c", "x")
    assert isinstance(reply, ModelPlaced)
    assert reply.peer_id == "a"


def test_two_requests_for_a_model_of_other_nodes_go_to_the_same_one() -> None:
    mesh = Mesh()
    both = local("z")
    mesh.join(
        node("a", 8 * GB, local("x")),
        node("b", 8 * GB, local("y", 4 * GB), both),
        node("c", 8 * GB, local("w", 3 * GB), both),
    )
    mesh.run(100)
    first, again = mesh.ask("a", "z"), mesh.ask("a", "z")
    assert isinstance(first, ModelPlaced)
    assert first == again
    assert first.peer_id in ("b", "c")
    mesh.run(10)
    assert mesh.served()["z"] == [first.peer_id]


SIZES_GB = dict(zip("abcdef", (1, 1, 2, 3, 5, 7), strict=True))
NAMES = st.sampled_from("abcdef")
PARTS = st.tuples(
    st.integers(0, 9),
    st.lists(NAMES, max_size=4, unique=True),
    st.integers(0, 6).map(lambda at: at == 6),
    st.lists(NAMES, max_size=2),
)
EVENTS = st.tuples(
    st.floats(0, 9),
    st.sampled_from(["join", "join", "kill", "unload", "drain", "ask", "ask"]),
    st.integers(0, 6),
    NAMES,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=8), st.floats(0.05, 1.5), st.floats(0.1, 6), st.lists(EVENTS, max_size=8))
def test_no_servable_model_stays_unserved_while_a_fitting_node_idles(
    parts: list[tuple[int, list[str], bool, list[str]]],
    lag: float,
    load: float,
    events: list[tuple[float, str, int, str]],
) -> None:
    """Nodes join, die, drain and are unloaded, engines are broken, requests come: then the mesh settles and rests."""
    mesh = Mesh(lag, load)
    coming = [
        node(
            f"p{at}", vram * GB, *(local(text, SIZES_GB[text] * GB) for text in texts), client=client, broken=tuple(bad)
        )
        for at, (vram, texts, client, bad) in enumerate(parts)
    ]
    for wait, what, at, text in events:
        peers = sorted(mesh.nodes)
        match what:
            case "join" if coming:
                mesh.join(coming.pop())
            case "kill" if len(peers) > 1:
                mesh.kill(peers[at % len(peers)])
            case "unload" if peers:
                mesh.unload(peers[at % len(peers)])
            case "drain" if peers:
                mesh.drain(peers[at % len(peers)])
            case "ask" if peers:
                mesh.ask(peers[at % len(peers)], name(text))
        mesh.run(wait)
    mesh.join(*coming)
    mesh.run(120)
    assert mesh.unserved() == []
    assert all(not one.loads for one in mesh.nodes.values() if one.client)
    before = (mesh.served(), [list(one.loads) for one in mesh.nodes.values()])
    mesh.run(900)
    assert (mesh.served(), [one.loads for one in mesh.nodes.values()]) == before, "a mesh at rest stays at rest"
