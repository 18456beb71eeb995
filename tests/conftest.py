"""What all tests have: a Ctrl-C that commands hear, and the servers of a test module."""

import signal

import pytest
from support.server_process import running_server


def pytest_configure():
    """A shell starts background jobs with SIGINT ignored, and the commands under test would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def server():
    with running_server(shards=2) as running:
        yield running
