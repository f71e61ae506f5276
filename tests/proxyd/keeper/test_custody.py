"""Who holds the sockets, who serves, who drains: the keeper's rules."""

from __future__ import annotations

from services.proxyd.keeper.custody import (
    ANOTHER_PORT_SECONDS,
    OFFER_SECONDS,
    RETRY_SECONDS,
    BindFailed,
    BindPort,
    Bound,
    Custody,
    DropSocket,
    Effect,
    KeepOffer,
    KeysSeen,
    NodeStopping,
    Offer,
    RememberPorts,
    Report,
    SendListeners,
    TellDrain,
    TellRelease,
    TellStop,
    Tick,
    WantedListener,
    WorkerJoined,
    WorkerLeft,
    WorkerServing,
    WorkerWants,
)

API = WantedListener(name="api", host="127.0.0.1", port=9337)
PUBLIC = WantedListener(name="api", host="0.0.0.0", port=9337, needs_key=True)
ANY = WantedListener(name="api", host="127.0.0.1", port=0)


def joined(
    worker: int, *, wanted: WantedListener = API, serving: bool = False, offer: Offer | None = None
) -> WorkerJoined:
    """A worker whose start is its number."""
    return WorkerJoined(worker, float(worker), serving, (offer,) if offer else (), (wanted,))


def kinds(effects: list[Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def bound() -> Custody:
    """Worker 1 serves on a bound listener."""
    core = Custody({})
    core.handle(joined(1), now=0)
    core.handle(Bound("api", 9337), now=0)
    core.handle(WorkerServing(1), now=0)
    return core


def test_the_first_worker_says_what_to_bind_and_gets_it() -> None:
    core = Custody({})
    assert core.next_deadline() is None
    assert core.handle(joined(1), now=0) == [BindPort("api", "127.0.0.1", 9337), SendListeners(1)]
    assert core.handle(Bound("api", 9337), now=0) == [
        SendListeners(1),
        Report("api", "127.0.0.1", 9337, ""),
        RememberPorts((("api", 9337),)),
    ]
    assert core.next_deadline() is None


def test_older_workers_drain_when_a_newer_one_serves_and_not_before() -> None:
    core = bound()
    assert core.handle(joined(2), now=1) == [SendListeners(2)]
    assert core.others_serve(2)
    assert core.handle(WorkerServing(2), now=2) == [TellDrain(1, successor=2)]
    assert core.handle(joined(3), now=3) == [SendListeners(3)]
    assert core.handle(WorkerServing(3), now=3) == [TellDrain(1, successor=3), TellDrain(2, successor=3)]


def test_a_newer_worker_is_never_drained_by_an_older_one() -> None:
    core = Custody({})
    core.handle(joined(2), now=0)
    core.handle(joined(1), now=0)
    assert core.handle(WorkerServing(1), now=0) == []


def test_after_a_keeper_restart_workers_bring_the_sockets_and_the_order_is_kept() -> None:
    core = Custody({"api": 9337})
    offer = Offer("api", "127.0.0.1", 9337)
    effects = core.handle(joined(2, serving=True, offer=offer), now=0)
    assert effects[0] == KeepOffer("api", 2)
    assert "BindPort" not in kinds(effects)
    assert kinds(effects)[-1] == "SendListeners"
    # The one that was draining joins late: it is told again, and its own socket is not needed.
    assert core.handle(joined(1, serving=True, offer=offer), now=0.1) == [SendListeners(1), TellDrain(1, successor=2)]


def test_an_offer_ends_the_waiting_for_a_taken_port() -> None:
    core = Custody({})
    core.handle(joined(2), now=0)
    assert core.handle(BindFailed("api", 9337, in_use=True, detail="in use"), now=0) == []
    assert core.next_deadline() == OFFER_SECONDS
    effects = core.handle(joined(1, serving=True, offer=Offer("api", "127.0.0.1", 9337)), now=0.05)
    assert effects[:2] == [KeepOffer("api", 1), SendListeners(2)]
    assert core.next_deadline() is None
    assert core.handle(BindFailed("api", 9337, in_use=True, detail="late"), now=0.1) == []


def test_sockets_offered_together_are_all_held_before_anybody_is_told_of_them() -> None:
    """Found under load: keeper and stub were killed together, and the new worker joined before the old one offered."""
    core = Custody({})
    console = WantedListener(name="console", host="127.0.0.1", port=3131)
    core.handle(WorkerJoined(2, 2.0, False, (), (API, console)), now=0)
    for name, port in (("api", 9337), ("console", 3131)):
        core.handle(BindFailed(name, port, in_use=True, detail="in use"), now=0)
    offers = (Offer("api", "127.0.0.1", 9337), Offer("console", "127.0.0.1", 3131))
    effects = core.handle(WorkerJoined(1, 1.0, True, offers, (API, console)), now=0.05)
    assert effects[:2] == [KeepOffer("api", 1), KeepOffer("console", 1)]
    assert effects.count(SendListeners(2)) >= 1


def test_an_offer_of_another_address_is_released_so_that_the_wanted_one_can_be_bound() -> None:
    core = Custody({})
    effects = core.handle(joined(1, offer=Offer("api", "127.0.0.1", 1234)), now=0)
    assert TellRelease(1, "api") in effects
    assert BindPort("api", "127.0.0.1", 9337) in effects
    assert TellRelease(2, "old") in core.handle(joined(2, offer=Offer("old", "127.0.0.1", 1)), now=0)


def test_a_taken_port_is_explained_once_and_tried_every_second() -> None:
    core = Custody({})
    core.handle(joined(1), now=0)
    core.handle(BindFailed("api", 9337, in_use=True, detail=""), now=0)
    assert core.handle(Tick(), now=OFFER_SECONDS) == [BindPort("api", "127.0.0.1", 9337)]
    effects = core.handle(BindFailed("api", 9337, in_use=True, detail=""), now=OFFER_SECONDS)
    assert kinds(effects) == ["Report", "SendListeners"]
    assert "ss -ltnp sport = :9337" in core.listeners["api"].reason
    assert core.next_deadline() == OFFER_SECONDS + RETRY_SECONDS
    assert core.handle(Tick(), now=1.0) == []
    assert core.handle(Tick(), now=1.4) == [BindPort("api", "127.0.0.1", 9337)]
    assert core.handle(BindFailed("api", 9337, in_use=True, detail=""), now=1.4) == []
    core.handle(Tick(), now=2.5)
    assert kinds(core.handle(Bound("api", 9337), now=2.5)) == ["SendListeners", "Report", "RememberPorts"]
    assert core.listeners["api"].reason == ""


def test_an_address_of_another_machine_is_explained() -> None:
    core = Custody({})
    core.handle(joined(1), now=0)
    effects = core.handle(BindFailed("api", 9337, in_use=False, detail="Cannot assign requested address"), now=0)
    assert kinds(effects) == ["Report", "SendListeners"]
    assert "Cannot assign requested address" in core.listeners["api"].reason


def test_a_public_listener_without_keys_is_refused_until_there_is_one() -> None:
    core = Custody({})
    effects = core.handle(joined(1, wanted=PUBLIC), now=0)
    assert kinds(effects) == ["Report", "SendListeners"]
    assert "meshctl keys create" in core.listeners["api"].reason
    assert core.waits_for_key
    assert core.handle(Tick(), now=RETRY_SECONDS) == []
    core.handle(KeysSeen(exist=True), now=2)
    assert core.handle(Tick(), now=2.5) == [BindPort("api", "0.0.0.0", 9337)]
    core.handle(Bound("api", 9337), now=2.5)
    assert not core.waits_for_key


def test_an_offered_public_socket_is_refused_without_keys_too() -> None:
    core = Custody({})
    effects = core.handle(joined(1, wanted=PUBLIC, offer=Offer("api", "0.0.0.0", 9337)), now=0)
    assert TellRelease(1, "api") in effects
    assert not any(isinstance(effect, KeepOffer | BindPort) for effect in effects)


def test_port_0_takes_the_remembered_port_first_and_another_after_a_while() -> None:
    core = Custody({"api": 5555, "console": 6666})
    assert core.handle(joined(1, wanted=ANY), now=0)[0] == BindPort("api", "127.0.0.1", 5555)
    core.handle(BindFailed("api", 5555, in_use=True, detail=""), now=0)
    assert core.handle(Tick(), now=OFFER_SECONDS) == [BindPort("api", "127.0.0.1", 5555)]
    core.handle(BindFailed("api", 5555, in_use=True, detail=""), now=OFFER_SECONDS)
    assert core.handle(Tick(), now=ANOTHER_PORT_SECONDS) == [BindPort("api", "127.0.0.1", 0)]
    effects = core.handle(Bound("api", 7777), now=ANOTHER_PORT_SECONDS)
    assert effects[-1] == RememberPorts((("api", 7777), ("console", 6666)))


def test_a_changed_address_is_released_everywhere_and_bound_anew() -> None:
    core = bound()
    moved = WantedListener(name="api", host="127.0.0.1", port=8000)
    assert core.handle(WorkerWants(1, (moved,)), now=5) == [
        DropSocket("api"),
        TellRelease(1, "api"),
        BindPort("api", "127.0.0.1", 8000),
    ]
    assert core.handle(Bound("api", 8000), now=5)[0] == SendListeners(1)
    assert core.handle(WorkerWants(1, (moved,)), now=6) == []


def test_what_changes_nothing_about_the_socket_keeps_it() -> None:
    core = bound()
    assert core.handle(WorkerWants(1, (ANY,)), now=5) == []
    assert core.handle(WorkerWants(1, (API,)), now=5) == []
    public = Custody({})
    public.handle(KeysSeen(exist=True), now=0)
    public.handle(joined(1, wanted=PUBLIC), now=0)
    public.handle(Bound("api", 9337), now=0)
    allowed = WantedListener(name="api", host="0.0.0.0", port=9337, needs_key=False)
    assert public.handle(WorkerWants(1, (allowed,)), now=1) == []


def test_only_the_newest_worker_is_believed() -> None:
    core = bound()
    core.handle(joined(2), now=1)
    old = WantedListener(name="api", host="127.0.0.1", port=1)
    assert core.handle(WorkerWants(1, (old,)), now=2) == []
    assert core.handle(WorkerWants(9, (old,)), now=2) == []
    assert core.listeners["api"].port == 9337


def test_draining_workers_are_not_sent_new_listeners() -> None:
    core = bound()
    core.handle(joined(2), now=1)
    core.handle(WorkerServing(2), now=1)
    moved = WantedListener(name="api", host="127.0.0.1", port=8000)
    core.handle(WorkerWants(2, (moved,)), now=5)
    assert [effect for effect in core.handle(Bound("api", 8000), now=5) if isinstance(effect, SendListeners)] == [
        SendListeners(2)
    ]


def test_going_down_stops_every_worker_also_one_that_joins_late() -> None:
    core = bound()
    core.handle(joined(2), now=1)
    assert core.handle(NodeStopping(), now=2) == [TellStop(1), TellStop(2)]
    assert core.handle(joined(3), now=2) == [TellStop(3)]


def test_a_worker_that_left_is_forgotten() -> None:
    core = bound()
    core.handle(WorkerLeft(1), now=1)
    assert core.handle(WorkerServing(1), now=1) == []
    assert not core.others_serve(2)
    assert core.handle(NodeStopping(), now=2) == []
