import pytest


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also the long matrices and campaigns")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--full"):
        return
    long = [item for item in items if item.get_closest_marker("full")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--full"):
        terminalreporter.write_line("the long matrices and campaigns were left out; --full runs them")
