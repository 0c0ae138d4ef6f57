"""What the parity tests share: the text, and one process's runs over it."""

import pytest

from tests.parity import yardstick
from tests.parity.yardstick import STEPS, run, settings


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of text that can be learnt."""
    return yardstick.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def alone(text, tmp_path_factory):
    """One process's run with further settings; each is made once."""
    made = {}

    def curve(steps=STEPS, mutate=None, **tables):
        key = repr((steps, mutate and mutate.__name__, sorted(tables.items())))
        if key not in made:
            folder = str(tmp_path_factory.mktemp("alone"))
            made[key] = run(settings(text, folder, steps, **tables), mutate, weights=True)
        return made[key]

    return curve


@pytest.fixture(autouse=True)
def world_of_one(monkeypatch):
    """pytest's own process is one process, whatever started it."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
