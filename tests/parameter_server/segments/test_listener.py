"""Taking segments outlives failures, and removes no socket but its own."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

from psengine.parameter_server.segments.memory import IS_AVAILABLE
from psengine.parameter_server.segments.passing import passing_path
from psengine.parameter_server.server.transport.segments import SegmentListener

pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason="memfd_create is Linux")


class Thread:
    """A shard's, which is asked nothing."""

    segments = None


def answer(path: str, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(5.0)
        stream.connect(path)
        stream.sendall(data)
        return stream.recv(4096)


def test_a_server_that_ends_late_leaves_its_successors_socket(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/server"
    path = passing_path(address)
    assert path is not None
    with SegmentListener([address]) as first:
        assert first.shards == {0}
        with SegmentListener([address]) as second:
            first.__exit__(None, None, None)
            assert os.path.exists(path)
            second.serve([Thread()])  # type: ignore[list-item]
            assert answer(path, b"x" * 200).startswith(b"PSEG")
        assert not os.path.exists(path)


class FailsOnce(SegmentListener):
    failures = 0

    def _receive(self, stream):  # type: ignore[no-untyped-def]
        if not self.failures:
            self.failures = 1
            raise MemoryError("injected")
        return super()._receive(stream)


def test_a_failure_ends_one_stream_and_not_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = f"ipc://{tmp_path}/server"
    path = passing_path(address)
    assert path is not None
    with FailsOnce([address]) as listener:
        listener.serve([Thread()])  # type: ignore[list-item]
        with contextlib.suppress(ConnectionError):
            assert answer(path, b"x" * 200) == b""
        assert answer(path, b"x" * 200).startswith(b"PSEG")
    assert "injected" in caplog.text
