"""The servers of a test module."""

from __future__ import annotations

import pytest
from support.server_process import running_server


@pytest.fixture(scope="module")
def server():
    with running_server(shards=2) as running:
        yield running
