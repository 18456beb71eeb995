"""ECHO: what is sent comes back, for readers and workers, and nothing else is taken for it."""

from __future__ import annotations

import pytest
import torch
from support.server_process import running_server

import psengine
from psengine.errors import ConfigurationError
from psengine.protocol.messages import MAX_PAYLOAD_BYTES


def test_readers_and_workers_measure_between_their_exchanges():
    with running_server() as server:
        with psengine.connect(server.addresses, role="reader", job="nobody", timeout_s=10.0) as reader:
            for size_bytes in (1, MAX_PAYLOAD_BYTES):
                assert 0 < reader.echo(size_bytes) < 10
            with pytest.raises(ConfigurationError, match="expected 1 to 16777216"):
                reader.echo(MAX_PAYLOAD_BYTES + 1)
        weights = {"w": torch.zeros(10)}
        with psengine.connect(server.addresses, job="echoing", timeout_s=10.0) as client:
            with pytest.raises(ConfigurationError, match="not connected"):
                client.echo(1000)
            client.register(weights, torch.optim.SGD(list(weights.values()), lr=1.0))
            assert client.echo() > 0
            assert torch.equal(client.push_pull({"w": torch.ones(10)})["w"], -torch.ones(10))
