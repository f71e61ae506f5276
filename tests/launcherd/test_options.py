"""Options: request over configuration over defaults, and what they cost."""

from __future__ import annotations

import pytest

from services.launcherd.command_line import OptionRefused
from services.launcherd.options import engine_options, local_model, options_need_bytes
from shared.config import EngineSection
from shared.ids import ModelName
from shared.messages.models import LoadModel
from tests.launcherd.table import model


def test_a_request_wins_over_configuration_over_defaults() -> None:
    """Options: `/load` request, command line, environment, mesh.toml, recipe."""
    file = model("m", trained=4096).file
    section = EngineSection(parallel=3, context_tokens=900)
    assert engine_options(file, EngineSection(parallel=2), 8).context_tokens == 8192
    assert engine_options(file, section, 8).context_tokens == 900
    asked = LoadModel(model=ModelName("m"), context_tokens=512, parallel=1)
    options = engine_options(file, section, 8, asked)
    assert (options.context_tokens, options.parallel) == (512, 1)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (4, 3), (16, 15)])
def test_threads_leave_a_core_to_the_daemons(cores: int, threads: int) -> None:
    """0: the number of physical cores, less one if there are more than two."""
    assert engine_options(model("m").file, EngineSection(), cores).threads == threads
    assert engine_options(model("m").file, EngineSection(threads=5), cores).threads == 5


def test_extra_arguments_are_joined_and_checked() -> None:
    """TRAPS 25: what meshd sets itself cannot be given."""
    file = model("m").file
    section = EngineSection(extra_args=("--no-mmap",))
    asked = LoadModel(model=ModelName("m"), extra_args=("--mlock",))
    assert engine_options(file, section, 2, asked).extra_args == ("--mlock",)
    with pytest.raises(OptionRefused):
        engine_options(file, section, 2, LoadModel(model=ModelName("m"), extra_args=("--host", "0.0.0.0")))


def test_the_need_is_that_of_the_options() -> None:
    known = model("m", size_bytes=1000)
    options = engine_options(known.file, EngineSection(), 2)
    assert options_need_bytes(known.file, options) == 1100
    local = local_model(known, options)
    assert (local.name, local.need_bytes, local.parallel) == ("m", 1100, 4)
