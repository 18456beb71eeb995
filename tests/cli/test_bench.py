"""psengine bench: what it measures and in what form; every candidate checks its own result. Never the times."""

from __future__ import annotations

import json

import pytest
import torch
from support.processes import run_ranks

from psengine.cli import bench, bench_worker
from psengine.cli.bench import describe_machine, print_tables, rows_of
from psengine.cli.main import main
from psengine.collectives import registry
from psengine.kernels import native
from psengine.parameter_server.client.embedded import EmbeddedServer
from psengine.verify.ranks import Place

SIZES_BYTES = (4096, 1 << 20)


def on_rank(rank, world_size, server):
    place = Place(rank=rank, world_size=world_size, device=torch.device("cpu"))
    return bench_worker.run(place, SIZES_BYTES, 1 << 20, 3, server)


def test_every_part_is_measured_and_its_results_are_right():
    with EmbeddedServer.start() as server:
        parts = run_ranks(on_rank, 2, server.addresses[0])[0]
    rows = [row for part in parts for row in rows_of(part)]
    candidates = ["gloo", "psengine in place", "psengine staged"] if native.has_shared_memory() else ["gloo"]
    expected = [("all-reduce", size, name) for size in SIZES_BYTES for name in candidates]
    expected += [("training step", None, name) for name in ("plain backward", "native DDP", "psengine sync")]
    expected += [("server", 1 << 20, "copy in memory"), ("server", 1 << 20, "push-pull"), ("server", 64, "echo")]
    assert [(row["part"], row["size_bytes"], row["candidate"]) for row in rows] == expected
    for row in rows:
        assert row["turns"] == 3
        assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert (row["ratio"] is None) == (row["candidate"] in ("gloo", "native DDP", "copy in memory", "echo"))


def spoiled_on_rank(rank, world_size):
    from psengine.collectives.automatic import AutomaticCollective
    from psengine.collectives.base import CompletedWork

    class Wrong(AutomaticCollective):
        def all_reduce(self, flat, scale=1.0, *, what="tensor"):
            super().all_reduce(flat, scale, what=what).wait()
            flat[-1] += self.rank  # on one rank alone
            return CompletedWork()

        def sum(self, flat, scale=1.0, *, what="tensor"):
            self.all_reduce(flat, scale, what=what)

    registry.AutomaticCollective = Wrong
    try:
        on_rank(rank, world_size, None)
    except bench_worker.WrongResultError as error:
        return str(error)
    return "it was not noticed"


@pytest.mark.skipif(not native.has_shared_memory(), reason="needs the native extension")
def test_a_candidate_that_is_wrong_is_caught():
    assert run_ranks(spoiled_on_rank, 2) == ["all-reduce of 4096 bytes by psengine in place: wrong result"] * 2


def test_the_tables_hold_every_row(capsys):
    sums = {"gloo": [0.002, 0.001, 0.003], "psengine in place": [0.001, 0.001, 0.001]}
    rows = rows_of(bench_worker.Part("all-reduce", 4096, "gloo", sums))
    # Ratios are taken within a turn.
    assert [row["ratio"] for row in rows] == [None, 0.5]
    print_tables(rows, describe_machine(), ["a note"], 1.0)
    written = capsys.readouterr().out
    assert all(row["candidate"] in written for row in rows)
    assert "a note" in written


@pytest.mark.slow
def test_where_keys_are_named_the_server_is_left_out(monkeypatch):
    monkeypatch.setenv("PSENGINE_SERVER_KEY", "keys/server.pub")
    parts, notes = bench.measure(3, timeout_s=60)
    assert {part.name for part in parts} == {"all-reduce", "training step"}
    assert "unset PSENGINE_SERVER_KEY" in notes[-1]


@pytest.mark.slow
def test_the_command_writes_json_alone(capfd):
    with pytest.raises(SystemExit) as end:
        main(["bench", "--quick", "--json"])
    written = capfd.readouterr()
    assert end.value.code in (0, None), written.err
    document = json.loads(written.out)
    assert document["machine"]["torch"] == torch.__version__
    parts = {row["part"] for row in document["rows"]}
    assert parts == {"all-reduce", "training step", "server"}
    (push_pull,) = [row for row in document["rows"] if row["candidate"] == "push-pull"]
    assert push_pull["ratio_to"] == "copy in memory"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--fast"], "--fast"), (["extra"], "extra"), (["--timeout-s", "0"], "--timeout-s"), (["--turns=x"], "--turns")],
)
def test_wrong_arguments_end_with_2_and_a_message(arguments, text, capfd):
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    assert end.value.code == 2
    written = capfd.readouterr()
    assert text in written.err
    assert "Traceback" not in written.err
