"""Whole meshes on a virtual clock: views converge, partitions heal, ghosts stay away, demand is exact. TRAPS 1, 2, 15.

``fast``: 20 seeds of up to 10 nodes; ``all``: 200 seeds of 3 to 100. A failing seed says how to see it again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from shared import codec
from shared.messages.gossip import PeerDown, PeerLeaving
from shared.messages.tunnel import FromPeer
from tests.simulation.world import Node, Weather, World

FAST_SEEDS = range(20)
ALL_SEEDS = range(200)
START_SECONDS = 30.0
CONVERGED_SECONDS = 45.0
"""After all faults stopped the views agree. A digest goes to everybody connected within 60 s; news is mostly faster."""
REMOVED_SECONDS = 10.0
GHOST_SECONDS = 900.0
MESSAGES_PER_NODE_SECOND = 20.0


def size_of(seed: int, largest: int) -> int:
    return random.Random(f"size {seed}").randint(3, largest)


def unlisted(world: World, index: int) -> bool:
    name = world.nodes[index].name
    return not any(name in node.listed() for node in world.running())


def demand_is(world: World, model: str, total: int) -> bool:
    return all(
        {item.model: item.requests_total for item in node.demand.demand}.get(model) == total
        for node in world.running()  # type: ignore[call-overload]
    )


def life_of_a_mesh(seed: int, nodes: int) -> str:
    """Start in bad weather, requests, a crash, a restart, a partition, a goodbye. Returns the trace."""
    chance = random.Random(f"story {seed}")
    world = World(
        seed,
        nodes,
        Weather(
            loss=chance.choice([0.0, 0.02, 0.1]), duplication=0.05, delay_seconds=(0.001, chance.choice([0.01, 0.1]))
        ),
    )
    order = list(range(1, nodes))
    chance.shuffle(order)
    world.start(0)
    for index in order:
        world.run(chance.uniform(0, 0.3))
        world.start(index)
    world.run_until(world.converged, START_SECONDS)

    asked = 0
    for _ in range(20):
        count = chance.randint(1, 5)
        world.ask_for(chance.randrange(nodes), "m", count)
        asked += count
        world.run(chance.uniform(0, 0.5))

    # A crash, noticed by nobody's operating system; the node is back later with what is on its disk.
    victim = chance.randrange(nodes)
    disk, core = world.nodes[victim], world.nodes[victim].gossip
    assert core is not None
    disk.counted = core.membership.demand.totals_of(disk.peer_id)
    world.run(12)
    world.kill(victim, silent=chance.random() < 0.5)
    world.run_until(lambda: unlisted(world, victim), REMOVED_SECONDS + 2 * (nodes > 10))
    world.start(victim)

    # A partition, with requests on both sides.
    world.partition({index: chance.randint(0, 1) for index in range(nodes)})
    for _ in range(10):
        world.ask_for(chance.randrange(nodes), "m")
        asked += 1
        world.run(chance.uniform(0, 4))

    # All faults stop.
    world.weather = Weather()
    world.partition({})
    world.run_until(world.converged, CONVERGED_SECONDS)
    world.run_until(lambda: demand_is(world, "m", asked), CONVERGED_SECONDS)
    busy = world.messages_per_node_second(20)
    assert busy < MESSAGES_PER_NODE_SECOND, world.replay(f"{busy:.1f} messages per node and second")

    gone = chance.randrange(nodes)
    world.leave(gone)
    world.run_until(lambda: unlisted(world, gone), 8.0)
    assert not any(node.refused for node in world.nodes), world.replay("something honest was refused")
    return world.trace()


def replayed(seed: int, nodes: int, life: Callable[[int, int], str] = life_of_a_mesh) -> str:
    try:
        return life(seed, nodes)
    except AssertionError as error:
        call = f"from tests.simulation.test_mesh import life_of_a_mesh; life_of_a_mesh({seed}, {nodes})"
        raise AssertionError(f'{error}\nreplay: .venv/bin/python -c "{call}"') from error


@pytest.mark.parametrize("seed", FAST_SEEDS)
def test_a_mesh_of_up_to_ten_lives_through_it(seed: int) -> None:
    replayed(seed, size_of(seed, 10))


@pytest.mark.slow
@pytest.mark.timeout(900)  # A hundred nodes with real signatures take a minute and more.
@pytest.mark.parametrize("seed", ALL_SEEDS)
def test_a_mesh_of_up_to_a_hundred_lives_through_it(seed: int) -> None:
    replayed(1_000 + seed, size_of(1_000 + seed, 100 if seed % 10 == 0 else 30))


def test_the_same_seed_is_the_same_run() -> None:
    assert life_of_a_mesh(3, 5) == life_of_a_mesh(3, 5)
    assert life_of_a_mesh(3, 5) != life_of_a_mesh(4, 5)


def test_a_failing_seed_says_how_to_replay_it() -> None:
    def fails(seed: int, nodes: int) -> str:
        world = World(seed, nodes)
        world.start(0)
        world.run_until(lambda: False, 0.1)
        return ""

    with pytest.raises(AssertionError, match=r"replay: .*life_of_a_mesh\(9, 3\)"):
        replayed(9, 3, fails)


def test_a_killed_node_is_listed_by_nobody_after_ten_seconds_nor_in_the_next_quarter_of_an_hour() -> None:
    """Two nodes were cut off meanwhile and come back with a view in which it is alive."""
    world = World(1, 5)
    world.start_all()
    world.run_until(world.converged, START_SECONDS)
    world.partition({3: 1, 4: 1})
    world.kill(1)
    took = world.run_until(lambda: not any("n1" in world.nodes[index].listed() for index in (0, 2)), REMOVED_SECONDS)
    world.partition({})
    world.run_until(lambda: unlisted(world, 1), REMOVED_SECONDS)
    ghosts: list[str] = []

    def listed(node: Node, message: codec.Message) -> None:
        if getattr(message, "state", "") in ("alive", "suspect") and message.announcement.name == "n1":
            ghosts.append(f"{world.now:.1f} s: {node.name} lists it as {message.state}: {message.reason}")

    world.on_publish.append(listed)
    started = time.perf_counter()
    world.run(GHOST_SECONDS)
    print(f"removed after {took:.1f} s; 15 minutes took {time.perf_counter() - started:.1f} s")
    assert ghosts == []
    assert world.converged()


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "tunnels close"])
def test_time_to_removal_at_ten_nodes(silent: bool) -> None:
    times = []
    for seed in range(10):
        world = World(seed, 10)
        world.start_all()
        world.run_until(world.converged, START_SECONDS)
        world.run(12)
        world.kill(4, silent=silent)
        times.append(world.run_until(lambda world=world: unlisted(world, 4), REMOVED_SECONDS))  # type: ignore[misc]
    print(f"removal at 10 nodes: {sum(times) / len(times):.1f} s on average, {max(times):.1f} s at most")
    assert sum(times) / len(times) < 6.0


def test_a_thousand_requests_through_three_entry_nodes_read_as_a_thousand_everywhere() -> None:
    world = World(2, 6, Weather(loss=0.1, duplication=0.1))
    world.start_all()
    world.run_until(world.converged, START_SECONDS)
    for index, count in enumerate((334, 333, 333)):
        for _ in range(count):
            world.ask_for(index, "m")
        world.run(0.7)
    world.run_until(lambda: demand_is(world, "m", 1000), 30.0)
    world.run(60)
    assert demand_is(world, "m", 1000)


def test_a_partition_heals_every_time() -> None:
    for seed in range(10):
        world = World(seed, 6)
        world.start_all()
        world.run_until(world.converged, START_SECONDS)
        for _ in range(3):
            world.partition({index: world.random.randint(0, 2) for index in range(6)})
            world.run(world.random.uniform(1, 40))
            world.partition({})
            world.run_until(world.converged, CONVERGED_SECONDS)


def test_what_is_forged_is_refused_by_everybody() -> None:
    world = World(5, 4)
    world.start_all()
    world.run_until(world.converged, START_SECONDS)
    liar, victim, target = world.nodes[1], world.nodes[2], world.nodes[3]
    assert victim.gossip is not None
    assert victim.gossip.membership.record is not None
    forged = PeerLeaving(
        record=victim.gossip.membership.record.__class__(
            payload=codec.encode(_leaving(victim)), signature=liar.key.sign(b"x"), peer_id=victim.peer_id
        )
    )
    world.tell(target, FromPeer(peer_id=liar.peer_id, payload=codec.encode(forged), channel="peer_leaving"))
    assert target.refused == {"forged": 1}
    assert victim.name in target.listed()
    claim = PeerDown(accuser=liar.peer_id, subject=victim.peer_id, incarnation=victim.identity.incarnation)
    for node in (world.nodes[0], target):
        world.tell(node, FromPeer(peer_id=liar.peer_id, payload=codec.encode(claim), channel="peer_down"))
    world.run_until(world.converged, 10.0)
    world.run(10)
    assert world.converged()


def _leaving(node: Node) -> codec.Message:
    from dataclasses import replace

    assert node.gossip is not None
    assert node.gossip.membership.own is not None
    own = node.gossip.membership.own
    return replace(own, state="leaving", seq=own.seq + 1)


@pytest.mark.slow
def test_figures_at_a_hundred_nodes() -> None:
    world = World(7, 100)
    world.start_all()
    took = world.run_until(world.converged, START_SECONDS)
    world.run(30)
    rate = world.messages_per_node_second(60)
    world.kill(50)
    removed = world.run_until(lambda: unlisted(world, 50), 15.0)
    print(f"100 nodes: converged in {took:.1f} s, {rate:.1f} messages per node and second, removal {removed:.1f} s")
    assert rate < MESSAGES_PER_NODE_SECOND
