"""compress=auto: what is measured leads to a codec, the same on every rank."""

from __future__ import annotations

import logging

import pytest
import torch
from support.processes import run_ranks
from torch import nn

import psengine
from psengine.errors import ConfigurationError
from psengine.strategies.codec_choice import Measured, fastest

BYTES = {"none": 40_000_000, "bf16": 20_000_000, "int8": 10_160_000, "fp4": 5_312_500}


def measured(rate: float, *, wait_s: float, encode_s: float = 0.0) -> Measured:
    times = {"none": 0.0, "bf16": 0.0, "int8": encode_s, "fp4": 2 * encode_s}
    return Measured(
        step_s=0.1 + wait_s,
        wait_s=wait_s,
        latency_s=1e-4,
        rate=rate,
        operations=2,
        bytes_by_codec=BYTES,
        encode_s=times,
    )


def test_a_slow_link_takes_the_fewest_bytes():
    link = measured(12e6, wait_s=3.3, encode_s=0.02)
    assert fastest(link) == "fp4"
    assert link.expected_s("none") == pytest.approx(3.4)
    assert link.expected_s("fp4") < 0.7


def test_what_hides_behind_backward_is_not_saved_and_encoding_costs():
    assert fastest(measured(12e6, wait_s=0.0, encode_s=0.02)) == "none"
    assert fastest(measured(4e9, wait_s=0.01, encode_s=0.02)) == "bf16"


def train(rank: int, world_size: int, strategy: str) -> tuple[str, str, list[torch.Tensor]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("psengine.strategies.codec_choice")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    model = psengine.DistributedDataParallel(nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 3)), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(9):
        optimizer.zero_grad()
        model(torch.randn(4, 50)).square().mean().backward()
        optimizer.step()
    return str(model.strategy.agreed_options["compress"]), " ".join(records), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("strategy", ["sync:compress=auto,lossy=true", "sync:compress=auto"])
def test_all_ranks_choose_alike_and_say_why(strategy):
    results = run_ranks(train, 2, strategy)
    assert len({codec for codec, _, _ in results}) == 1
    codec, text, _ = results[0]
    assert "compress=auto: a step takes" in text
    assert f"Chosen: {codec}" in text
    assert "lossy" in strategy or codec == "none"
    for mine, other in zip(results[0][2], results[1][2], strict=True):
        assert torch.equal(mine, other)


def test_over_servers_the_codec_has_a_name():
    with pytest.raises(ConfigurationError, match="compress=auto changes the codec during training"):
        psengine.AsyncServer(compress="auto")
    with pytest.raises(ConfigurationError, match="lossy of codec 'auto'"):
        psengine.SyncAllReduce(compress="auto:lossy=perhaps")
