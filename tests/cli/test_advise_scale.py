"""psengine advise --hosts: bytes against messages counted one by one, times against hand calculation, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support.command_process import run_command

from psengine.cli.advising.scale import CONSTANTS, MOST_HOSTS, Training, advise_scale
from psengine.cli.advising.step_model import BUCKET_BYTES, FIRST_BUCKET_BYTES, Constants, Network, Road, step_s
from psengine.cli.advising.traffic import Coding, traffic
from psengine.cli.main import main

TRAINING = str(Path(__file__).parents[1] / "support" / "launched_training.py")
LAYOUTS = [(2, 1), (4, 1), (8, 1), (2, 2), (3, 4)]
HALF = Coding(payload=0.5)


class Wires:
    """Counts what leaves each host, message by message."""

    def __init__(self, hosts: int, ranks_per_host: int) -> None:
        self.ranks_per_host = ranks_per_host
        self.ranks = range(hosts * ranks_per_host)
        self.sent = [0.0] * hosts

    def send(self, source: int, target: int, size: float) -> None:
        if source // self.ranks_per_host != target // self.ranks_per_host:
            self.sent[source // self.ranks_per_host] += size

    def around(self, steps: int, size: float) -> None:
        """Each rank hands something to the next, so many times."""
        for _ in range(steps):
            for rank in self.ranks:
                self.send(rank, (rank + 1) % len(self.ranks), size)

    def to_all(self, size: float) -> None:
        for source in self.ranks:
            for target in self.ranks:
                self.send(source, target, size)


def ring(wires: Wires, payload: float) -> None:
    world_size = len(wires.ranks)
    wires.around(2 * (world_size - 1), payload / world_size)


def slices(wires: Wires, payload: float) -> None:
    world_size = len(wires.ranks)
    wires.to_all(payload / world_size)
    wires.around(world_size - 1, payload / world_size)


def gathered(wires: Wires, payload: float) -> None:
    wires.around(len(wires.ranks) - 1, payload)


def servers(wires: Wires, payload: float) -> None:
    """A shard on each host, at the host's first rank's place."""
    hosts = len(wires.sent)
    for worker in wires.ranks:
        for host in range(hosts):
            wires.send(worker, host * wires.ranks_per_host, payload / hosts)
            wires.send(host * wires.ranks_per_host, worker, payload / hosts)


@pytest.mark.parametrize(("hosts", "ranks_per_host"), LAYOUTS)
@pytest.mark.parametrize(
    ("strategy", "coding", "algorithm"),
    [
        ("sync", Coding(), ring),
        ("sync:compress=bf16", HALF, ring),
        ("sync:compress=int8", HALF, slices),
        ("sync:compress=topk,ratio=0.01", HALF, gathered),
        ("sync:compress=powersgd", HALF, ring),
        ("sync-server", Coding(), servers),
        ("async:compress=int8", HALF, servers),
    ],
)
def test_bytes_are_those_of_the_algorithm(strategy, coding, algorithm, hosts, ranks_per_host):
    wires = Wires(hosts, ranks_per_host)
    algorithm(wires, coding.payload)
    assert traffic(strategy, hosts, ranks_per_host, coding).sent == pytest.approx(max(wires.sent))


def test_hosts_trade_slices_under_the_hierarchical_collective():
    """benchmarks/cluster counted 34.9 MB of 34.9 MB of gradients on two hosts, where a ring sends 52.3."""
    assert traffic("hierarchical", 2, 2).sent == 1.0
    assert traffic("sync", 2, 2).sent == 1.5


def test_rarer_exchanges_send_less():
    ring = traffic("sync", 4).sent
    assert traffic("local:every=16", 4).sent == pytest.approx(ring / 16)
    assert traffic("local", 4).every == 16
    assert traffic("diloco:every=50,compress=bf16", 4, 1, HALF).sent == pytest.approx(ring / 100)
    assert traffic("diloco-server", 4).every == 100


IDEAL = Constants(
    ring=Road(efficiency=1.0, host_s=0.0),
    gathers=Road(efficiency=1.0, host_s=0.0),
    servers=Road(efficiency=1.0, host_s=0.0),
    operation_s=0.0,
    value_s=0.0,
    message_s=0.0,
)


def network(hosts=2, ranks_per_host=1, bytes_per_s=1e8, **more):
    return Network(hosts=hosts, ranks_per_host=ranks_per_host, bytes_per_s=bytes_per_s, **more)


def test_without_computing_a_step_is_its_bytes_and_its_round_trips():
    value_bytes = 3 * FIRST_BUCKET_BYTES  # two buckets
    for strategy, sent in (("sync", 1.5), ("sync-server", 1.5), ("sync:compress=int8", 1.5)):
        found = step_s(traffic(strategy, 4), value_bytes, 0.0, network(4), IDEAL)
        assert found == pytest.approx(sent * value_bytes / 1e8), strategy
    delayed = step_s(traffic("sync", 4), value_bytes, 0.0, network(4, round_trip_s=0.02), IDEAL)
    assert delayed == pytest.approx(1.5 * value_bytes / 1e8 + 2 * 6 * 0.01)


def test_backward_hides_all_but_the_last_bucket_on_a_fast_link():
    value_bytes, compute_s = FIRST_BUCKET_BYTES + 2 * BUCKET_BYTES, 10.0
    found = step_s(traffic("sync", 2), value_bytes, compute_s, network(), IDEAL)
    assert found == pytest.approx(compute_s + BUCKET_BYTES / 1e8)
    # On a slow one all wait behind the first, which is full after its share of backward.
    slow_link = network(bytes_per_s=1e5)
    begins_s = compute_s / 3 + compute_s * 2 / 3 * FIRST_BUCKET_BYTES / value_bytes
    found = step_s(traffic("sync", 2), value_bytes, compute_s, slow_link, IDEAL)
    assert found == pytest.approx(begins_s + value_bytes / 1e5)


def test_what_is_sent_after_the_step_is_not_hidden():
    value_bytes, compute_s, sent_s = 1e7, 1.0, 1e7 / 1e8
    for strategy, expected_s in (
        ("async", compute_s + sent_s),
        ("local:every=4", compute_s + sent_s / 4),
        ("diloco:every=10,overlap=1", compute_s),
        ("diloco:every=10", compute_s + sent_s / 10),
    ):
        assert step_s(traffic(strategy, 2), value_bytes, compute_s, network(), IDEAL) == pytest.approx(expected_s)


def test_encoding_takes_the_cores_time():
    coding = Coding(payload=0.25, encode_s=1e-8, decode_s=2e-8, decode_add_s=4e-8)
    value_bytes = FIRST_BUCKET_BYTES
    fast = network(bytes_per_s=1e15, sharing=3.0)
    found = step_s(traffic("sync:compress=int8", 2, 1, coding), value_bytes, 0.0, fast, IDEAL)
    # All values, the own half of the sum; the sum of two ranks' halves; all values of the sum.
    assert found == pytest.approx(3 * value_bytes * (1.5 * 1e-8 + 4e-8 + 2e-8))
    found = step_s(traffic("sync:compress=topk", 3, 1, coding), value_bytes, 0.0, fast, IDEAL)
    assert found == pytest.approx(3 * value_bytes * (1e-8 + 2e-8 + 2 * 4e-8))


CODINGS = {
    name: Coding(payload=payload, encode_s=2e-10, decode_s=1e-10, decode_add_s=1e-10)
    for name, payload in (("bf16", 0.5), ("int8", 0.25), ("fp4", 0.13), ("onebit", 0.03), ("topk", 0.02))
} | {"powersgd": Coding(payload=0.01, encode_s=4e-9)}
GPT = Training(value_bytes=35e6, compute_s=0.1, samples=8)


def test_the_fastest_comes_first_and_samples_are_those_of_all_ranks():
    advice = advise_scale(GPT, network(4, bytes_per_s=125e6), CODINGS)
    seconds = [one.step_s for one in advice.predictions]
    assert seconds == sorted(seconds)
    sync = next(one for one in advice.predictions if one.strategy == "sync")
    assert sync.step_s == step_s(traffic("sync", 4), 35e6, 0.1, network(4, bytes_per_s=125e6), CONSTANTS)
    assert sync.rate == pytest.approx(4 * 8 / sync.step_s)
    assert sync.sent_bytes == pytest.approx(1.5 * 35e6)


@pytest.mark.parametrize(
    ("hosts", "bytes_per_s", "compute_s", "lossless", "lossy"),
    [
        (4, 1.25e6, 0.1, "sync", "sync:compress=powersgd,rank=4"),
        (4, 125e6, 1.0, "sync", "sync:compress=bf16"),  # topk is the fastest, and less than 10 % faster
        (4, 1e12, 10.0, "sync", "sync"),
    ],
)
def test_what_is_recommended(hosts, bytes_per_s, compute_s, lossless, lossy):
    training = Training(value_bytes=35e6, compute_s=compute_s)
    advice = advise_scale(training, network(hosts, bytes_per_s=bytes_per_s), CODINGS)
    assert (advice.lossless, advice.lossy) == (lossless, lossy)
    assert ("next to nothing" in advice.lossless_reason) == (bytes_per_s == 1e12)


def test_ranks_that_share_a_host_are_offered_the_hierarchy():
    several = advise_scale(GPT, network(2, 4, bytes_per_s=125e6), CODINGS)
    assert several.lossless == "hierarchical"
    assert "faster than sync" in several.lossless_reason
    alone = advise_scale(GPT, network(8, 1, bytes_per_s=125e6), CODINGS)
    assert all(one.strategy != "hierarchical" for one in alone.predictions)


NETWORK = ["--hosts", "8", "--mbit", "1000"]
MODEL = ["--parameters", "124M", "--step-ms", "350"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "0", "--mbit", "1000", *MODEL], "(expected 2 or more, got 0)"),
        (["--hosts", "1", "--mbit", "1000", *MODEL], "(expected 2 or more, got 1)"),
        (["--hosts", "-4", "--mbit", "1000", *MODEL], "(expected 2 or more, got -4)"),
        (["--hosts", "8", *MODEL], "such as --mbit 1000, got none"),
        (["--hosts", "8", "--mbit", "0", *MODEL], "(expected a number above 0, got 0)"),
        (["--hosts", "8", "--mbit", "-1", *MODEL], "(expected a number above 0, got -1)"),
        (["--hosts", "8", "--mbit", "nan", *MODEL], "(expected a number above 0, got nan)"),
        (["--hosts", "8", "--mbit", "inf", *MODEL], "(expected a number above 0, got inf)"),
        ([*NETWORK, "--round-trip-ms", "-1", *MODEL], "(expected 0 or more, got -1)"),
        ([*NETWORK, "--round-trip-ms", "nan", *MODEL], "(expected 0 or more, got nan)"),
        ([*NETWORK, "--ranks-per-host", "0", *MODEL], "(expected 1 or more, got 0)"),
        ([*NETWORK, "--parameters", "124M"], "(expected both, or a script to measure, got --parameters alone)"),
        ([*NETWORK, "--step-ms", "350"], "got --step-ms alone"),
        ([*NETWORK, "--parameters", "many", "--step-ms", "1"], "8700000, 124M or 7B, got many)"),
        ([*NETWORK, "--parameters", "0", "--step-ms", "1"], "7B, got 0)"),
        ([*NETWORK, "--parameters", "1M", "--step-ms", "0"], "(expected a number above 0, got 0)"),
        ([*NETWORK, "--parameters", "1M", "--step-ms", "nan"], "(expected a number above 0, got nan)"),
        ([*NETWORK, *MODEL, TRAINING], f"(expected no script, got {TRAINING})"),
        (["--mbit", "1000", TRAINING], "(expected --hosts N with them)"),
        (NETWORK, "which script"),
    ],
)
def test_a_network_that_cannot_be_is_refused(arguments, message, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit) as end:
        main(["advise", *arguments])
    written = capfd.readouterr()
    assert (end.value.code, written.out) == (2, "")
    assert message in written.err
    assert "Traceback" not in written.err


@pytest.mark.parametrize("hosts", [MOST_HOSTS, 1000])
def test_a_model_that_is_described_is_predicted(hosts, capfd):
    arguments = ["advise", "--hosts", str(hosts), "--mbit", "1000", "--parameters", "1M", "--step-ms", "35"]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--json"])
    assert end.value.code in (0, None)
    found = json.loads(capfd.readouterr().out)
    assert found["training"] == {"value_bytes": 4e6, "compute_s": 0.035, "samples": None}
    assert found["network"]["bytes_per_s"] == 125e6
    assert {"sync", "sync-server", "local:every=16"} <= {one["strategy"] for one in found["predictions"]}
    assert all(math.isfinite(one["step_s"]) and one["step_s"] >= 0.035 for one in found["predictions"])
    assert all(0 < coding["payload"] < 1 for coding in found["codecs"].values())
    assert any("extrapolated" in sentence for sentence in found["assumptions"]) == (hosts == 1000)
    with pytest.raises(SystemExit):
        main(arguments)
    shown = capfd.readouterr().out
    measured_again = "Codecs: "  # other figures each time
    for words in (*found["assumptions"], found["lossless_reason"], "Lossy: ", "what it changes"):
        assert words.startswith(measured_again) or words in shown


@pytest.mark.slow
def test_a_script_is_measured_and_predicted():
    options = ["--hosts", "4", "--mbit", "100", "--steps", "13", "--json"]
    code, out, err = run_command(["advise", *options, TRAINING, "5000", "1", "0.05"])
    assert code == 0, err
    found = json.loads(out)
    assert found["training"]["value_bytes"] == 4 * (4 * 2 + 2)
    assert found["training"]["compute_s"] >= 0.05  # the slow rank's
    assert found["rate_unit"] == "samples/s"
    assert "measured here, the slowest of 2 ranks" in found["assumptions"][0]
