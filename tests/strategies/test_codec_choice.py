"""compress=auto: what is measured leads to a codec, the same on every rank."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from support.processes import run_ranks
from torch import nn

import psengine
from psengine.errors import ConfigurationError
from psengine.strategies import codec_choice
from psengine.strategies.codec_choice import Measured, fastest
from psengine.strategies.exchange import Step
from psengine.strategies.registry import resolve_strategy

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


def test_a_codec_has_to_save_three_percent_of_the_step():
    only_bf16 = {name: BYTES[name] for name in ("none", "bf16")}
    for saved_s, name in ((0.029, "none"), (0.031, "bf16")):
        link = dataclasses.replace(measured(20e6 / saved_s, wait_s=0.9), bytes_by_codec=only_bf16)
        assert link.expected_s("none") == pytest.approx(1.0)
        assert fastest(link) == name


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


def resumed(rank: int, world_size: int) -> None:
    codec_choice.fastest = lambda _: "onebit"  # type: ignore[assignment]
    saved: dict[str, torch.Tensor] = {}
    for _ in range(2):
        model = psengine.DistributedDataParallel(nn.Linear(50, 50), strategy="sync:compress=auto,lossy=true")
        if saved:
            model.strategy.load_state_dict(saved)
            assert model.strategy.state_dict().keys() == saved.keys(), "a checkpoint in the first steps keeps them"
        for _ in range(6):
            model.zero_grad()
            model(torch.randn(4, 50)).sum().backward()
        model.strategy.begin(Step(live_world_size=world_size))  # the seventh step chooses
        assert all(torch.equal(one, saved[name]) for name, one in model.strategy.state_dict().items() if saved)
        for _ in range(2):
            model.zero_grad()
            model(torch.randn(4, 50)).sum().backward()
        saved = model.strategy.state_dict()
        assert saved.keys() == {"weight", "bias"}


def test_a_run_that_chose_goes_on_from_its_own_checkpoint():
    run_ranks(resumed, 2)


def test_only_sync_chooses_a_codec_itself():
    for strategy in ("sync-server", "async", "local:every=2", "local-server:every=2", "diloco", "diloco-server"):
        with pytest.raises(ConfigurationError, match="compress=auto chooses a codec during training, which only strat"):
            resolve_strategy(f"{strategy}{',' if ':' in strategy else ':'}compress=auto")
    with pytest.raises(ConfigurationError, match="compress=auto chooses a codec during training"):
        psengine.connect("tcp://127.0.0.1:1", compress="auto")
    with pytest.raises(ConfigurationError, match="lossy of codec 'auto'"):
        psengine.SyncAllReduce(compress="auto:lossy=perhaps")
    with pytest.raises(ConfigurationError, match="a communication hook decides itself what travels"):
        psengine.SyncAllReduce(compress="auto:lossy=true").register_comm_hook(lambda bucket: None)
