"""services.gossipd.io.authority_files: private, whole, never silently replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.gossipd.io import authority_files
from services.gossipd.io.authority_files import AuthorityFiles
from services.gossipd.io.state_files import StateFiles
from services.gossipd.mesh_identity import MeshIdentity
from services.gossipd.trust import Trust, wanted_identity
from shared.errors import StateError
from shared.paths import NodePaths
from tests.daemons import start_daemon_process
from tests.gossipd.test_credentials import founded
from tests.gossipd.test_trust import THIRD


def saved(folder: Path, name: str = "home") -> Trust:
    files, trust = AuthorityFiles(folder), Trust(founded(name))
    trust.ban(THIRD, lift=False)
    files.save_credentials(trust.credentials)
    files.save_decisions(trust)
    return trust


def test_what_is_saved_is_loaded_and_private(tmp_path: Path) -> None:
    trust = saved(tmp_path)
    loaded = AuthorityFiles(tmp_path).load()
    assert loaded.credentials.to_json() == trust.credentials.to_json()
    assert loaded.to_json() == trust.to_json()
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600, 0o600]


def test_a_file_that_others_could_read_is_made_private(tmp_path: Path) -> None:
    saved(tmp_path)
    path = AuthorityFiles(tmp_path).credentials_path
    path.chmod(0o644)
    AuthorityFiles(tmp_path).load()
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_first_start_has_nothing(tmp_path: Path) -> None:
    assert AuthorityFiles(tmp_path).load().credentials.root is None


@pytest.mark.parametrize("name", [authority_files.CREDENTIALS_FILE, authority_files.DECISIONS_FILE])
@pytest.mark.parametrize("damage", ["", "{", "\udcff", "null", "[1]"])
def test_a_damaged_file_stops_the_start_with_words(tmp_path: Path, name: str, damage: str) -> None:
    saved(tmp_path)
    (tmp_path / name).write_bytes(damage.encode("utf-8", "surrogateescape"))
    with pytest.raises(StateError, match=rf"{name}.*(restore it from a backup)"):
        AuthorityFiles(tmp_path).load()


def test_killed_between_any_two_writes_it_is_one_whole_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails at any of its steps leaves the former file as it was."""
    old = saved(tmp_path)
    new = Trust(founded("other"))
    for step in ("fsync", "open"):

        def fails(*_arguments: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, step, fails)
            with pytest.raises(StateError, match="No space left"):
                AuthorityFiles(tmp_path).save_credentials(new.credentials)
        loaded = AuthorityFiles(tmp_path).load()
        assert loaded.credentials.mesh_id == old.credentials.mesh_id
    assert sorted(path.name for path in tmp_path.iterdir()) == ["authority.json", "invites.json"]
    AuthorityFiles(tmp_path).save_credentials(new.credentials)
    between = AuthorityFiles(tmp_path).load()
    assert between.credentials.mesh_id == new.credentials.mesh_id
    assert between.claims is not None
    assert between.claims.banned == frozenset(), "the decisions of the former mesh do not count in the new one"


def test_what_a_killed_writer_left_beside_it_is_removed(tmp_path: Path) -> None:
    trust = saved(tmp_path)
    (tmp_path / "authority.12345.tmp").write_text(trust.credentials.to_json()[:100])
    assert AuthorityFiles(tmp_path).load().credentials.mesh_id == trust.credentials.mesh_id
    assert sorted(path.name for path in tmp_path.iterdir()) == ["authority.json", "invites.json"]


def test_a_node_killed_while_it_changes_its_mesh_is_wholly_in_one_of_them(tmp_path: Path) -> None:
    """The order is credentials, decisions, identity: after each of the three writes a start finds one whole mesh."""
    for written in range(4):
        folder = tmp_path / str(written)
        folder.mkdir()
        old = saved(folder)
        states, files = StateFiles(folder), AuthorityFiles(folder)
        states.save_identity(MeshIdentity(mesh_id=old.credentials.mesh_id, mesh_name="home", incarnation=4))
        new = Trust(founded("other"))
        if written > 0:
            files.save_credentials(new.credentials)
        if written > 1:
            files.save_decisions(new)
        if written > 2:
            states.save_identity(MeshIdentity(mesh_id=new.credentials.mesh_id, mesh_name="other", incarnation=4))
        trust = AuthorityFiles(folder).load()
        identity = wanted_identity(StateFiles(folder).load_identity(), trust.credentials)
        expected = new if written else old
        assert (identity.mesh_id, identity.incarnation) == (expected.credentials.mesh_id, 4)
        assert trust.credentials.to_json() == expected.credentials.to_json()
        assert trust.claims is not None
        assert trust.claims.banned == (frozenset() if written else {THIRD})


def test_gossipd_does_not_start_with_a_damaged_file_and_says_why(node_paths: NodePaths) -> None:
    trust = saved(node_paths.state)
    path = AuthorityFiles(node_paths.state).credentials_path
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    daemon = start_daemon_process("gossipd", node_paths.home)
    try:
        assert daemon.wait_exit() != 0
    finally:
        daemon.end()
    assert "authority.json is damaged" in daemon.log()
    assert "restore it from a backup" in daemon.log()
    assert "BEGIN" not in daemon.log()
    assert "Traceback" not in daemon.log()
    assert path.read_text() == whole[: len(whole) // 2], "never replaced"
    assert trust.credentials.mesh_id
