import pytest

LEFT_OUT = {
    "full": "the long matrices and campaigns were left out; --full runs them",
    "slurm": "the tests that install and start a SLURM cluster were left out; --slurm runs them",
}


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also the long matrices and campaigns")
    parser.addoption(
        "--slurm", action="store_true", help="also the tests on a SLURM cluster, which they install as root"
    )


def pytest_collection_modifyitems(config, items):
    for marker in LEFT_OUT:
        if not config.getoption(f"--{marker}"):
            out = [item for item in items if item.get_closest_marker(marker)]
            config.hook.pytest_deselected(items=out)
            items[:] = [item for item in items if not item.get_closest_marker(marker)]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    for marker, words in LEFT_OUT.items():
        if not config.getoption(f"--{marker}"):
            terminalreporter.write_line(words)
