"""ECHO: what is sent comes back, for readers and workers, and nothing else is taken for it."""

from __future__ import annotations

import pytest
import torch
from support.server_process import running_server

import psengine
from psengine.errors import ConfigurationError
from psengine.protocol.messages import MAX_PAYLOAD_BYTES


@pytest.fixture(scope="module")
def server():
    with running_server() as process:
        yield process


def reader(addresses, **options):
    return psengine.connect(addresses, role="reader", job="nobody", **{"timeout_s": 10.0, **options})


class TestAgainstAServer:
    @pytest.mark.parametrize("size_bytes", [1, MAX_PAYLOAD_BYTES])
    def test_a_reader_without_a_job_measures(self, server, size_bytes):
        with reader(server.addresses) as client:
            assert 0 < client.echo(size_bytes) < 10

    def test_a_worker_measures_between_its_exchanges(self, server):
        weights = {"w": torch.zeros(10)}
        with psengine.connect(server.addresses, job="echoing", timeout_s=10.0) as client:
            with pytest.raises(ConfigurationError, match="not connected"):
                client.echo(1000)
            client.register(weights, torch.optim.SGD(list(weights.values()), lr=1.0))
            assert client.echo() > 0
            assert torch.equal(client.push_pull({"w": torch.ones(10)})["w"], -torch.ones(10))

    def test_what_is_too_large(self, server):
        with reader(server.addresses) as client, pytest.raises(ConfigurationError, match="expected 1 to 16777216"):
            client.echo(MAX_PAYLOAD_BYTES + 1)
