"""Who serves what, over many nodes and a network that loses and delays: the real machines on a virtual clock."""

from __future__ import annotations

import random

import pytest

from tests.simulation.elections_world import Disk, ElectionsWorld
from tests.simulation.world import Weather, World

ROUGH = Weather(loss=0.05, duplication=0.02, delay_seconds=(0.001, 0.05))
SETTLED_SECONDS = 40.0
"""Death is found within 10 s, acted upon after 3, and a node that does not take its part is passed over after 6."""


def mesh(seed: int, disks: list[Disk], vram_gb: list[int], weather: Weather = ROUGH) -> ElectionsWorld:
    return ElectionsWorld(World(seed, len(disks), weather), disks, vram_gb)


def drawn(seed: int, nodes: int) -> tuple[list[Disk], list[int]]:
    chance = random.Random(seed)
    sizes = {f"m{at}": chance.randint(1, 9) for at in range(nodes)}
    disks = [
        {name: sizes[name] for name in chance.sample(sorted(sizes), chance.randint(0, min(4, nodes)))}
        for _ in range(nodes)
    ]
    return disks, [chance.choice([2, 4, 8, 16]) for _ in range(nodes)]


@pytest.mark.parametrize("seed", range(8))
def test_no_servable_model_is_unserved_while_a_fitting_node_idles(seed: int) -> None:
    """One assignment each, through joins, deaths and returns."""
    disks, vram = drawn(seed, 3 + seed)
    world = mesh(seed, disks, vram)
    chance = random.Random(seed)
    for index in range(len(disks)):
        world.start(index)
        world.world.run(chance.uniform(0, 1.5))
    world.world.run(SETTLED_SECONDS)
    check(world)
    down = chance.randrange(1, len(disks))
    world.kill(down)
    world.world.run(SETTLED_SECONDS)
    check(world)
    world.start(down)
    world.world.run(SETTLED_SECONDS)
    check(world)


def check(world: ElectionsWorld) -> None:
    assert not world.unserved_though_a_node_idles(), world.world.replay(f"{world.changes} {world.disks}")
    assert all(len(world.models_of(index)) <= 1 for index in world.assigned)
    assert world.agreed(), world.world.replay("views differ")


def test_the_same_seed_places_the_same() -> None:
    traces = set()
    for _ in range(2):
        world = mesh(5, *drawn(5, 6))
        world.start(*range(6))
        world.world.run(20)
        traces.add(world.trace())
    assert len(traces) == 1


def test_ten_equal_joiners_of_a_mesh_serve_ten_models() -> None:
    disks: list[Disk] = [{}] + [{f"m{at}": 1 + at % 3 for at in range(10)}] * 10
    world = mesh(1, disks, [8] * 11, Weather())
    world.start(0)
    world.world.run(8)
    world.start(*range(1, 11))
    world.world.run(SETTLED_SECONDS)
    assert world.served() == sorted(f"m{at}" for at in range(10))


def test_a_standby_takes_over_what_a_dead_host_served() -> None:
    """Ten are active, so the last stands by although it has a model; it takes the model that died with its host."""
    disks: list[Disk] = [{}, *({f"m{at}": 4} for at in range(10)), {"m0": 4}]
    world = mesh(2, disks, [8] * 12, Weather())
    world.start(*range(11))
    world.world.run(15)
    world.start(11)
    world.world.run(15)
    assert world.models_of(11) == ()
    assert "at most 10" in world.assigned[11].idle_reason
    world.kill(1)
    seconds = world.world.run_until(lambda: world.models_of(11) == ("m0",), 15)
    assert seconds >= 3, "not before the debounce is over"


def test_a_node_that_comes_back_within_three_seconds_moves_nothing() -> None:
    disks: list[Disk] = [{}, {"a": 4}, {"b": 4}, {"b": 4, "a": 4}]
    world = mesh(3, disks, [8, 8, 8, 8], Weather())
    world.start(0, 1, 2, 3)
    world.world.run(SETTLED_SECONDS)
    before = {index: world.models_of(index) for index in (0, 1, 3)}
    changed = len(world.changes)
    world.kill(2)
    world.world.run(1.5)
    world.start(2)
    world.world.run(SETTLED_SECONDS)
    assert {index: world.models_of(index) for index in (0, 1, 3)} == before
    assert [node for _, node, _ in world.changes[changed:]] == [2]


def test_what_a_node_does_not_take_the_next_one_takes() -> None:
    """A free node whose electiond hangs is passed over."""
    disks: list[Disk] = [{}, {"a": 4}, {"a": 4}, {"a": 4}]
    for hung in (1, 2, 3):
        world = mesh(4, disks, [8, 8, 8, 8], Weather())
        world.start(0, 1, 2, 3)
        world.elections.pop(hung)
        world.world.run(SETTLED_SECONDS)
        assert world.served() == ["a", "a"], hung
