"""Short forms of the hostile client's attacks: the server serves on, an honest worker loses nothing, nothing grows."""

from __future__ import annotations

import math

import pytest
from attacks.hostile_client import (
    ATTACKS,
    attack_fixture,
    endless_messages,
    idle_connections,
    slow_readers,
)

SHORT = dict.fromkeys(ATTACKS, 1000) | {idle_connections: 100, slow_readers: 2, endless_messages: 20}


@pytest.fixture(scope="module")
def attacked():
    with attack_fixture() as made:
        yield made


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_costs_little_and_changes_nothing(attacked, attack):
    outcome = attacked.run(attack, SHORT[attack])
    assert outcome.counters.sent >= SHORT[attack]
    assert outcome.survived
    assert outcome.changed == 0
    assert outcome.health == "10/10"
    assert outcome.newcomer_s < math.inf
    assert outcome.disk_bytes < 10e6  # a generation has 0.4 MB
    assert outcome.memory_bytes < 512e6
    assert attacked.server.log().count("\n") < 100


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_at_length(attack):
    with attack_fixture() as made:
        outcome = made.run(attack, ATTACKS[attack])
        assert outcome.survived
        assert outcome.changed == 0
        assert outcome.health == "10/10"
        made.server.terminate()
        assert made.server.wait(30) == 0
