"""A run told again from its servers' logs: the bits of the workers' answers and of the servers, and who broke it."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier

import pytest
import torch
from safetensors.torch import load_file
from support.server_process import running_server
from support.server_training import assert_equal
from support.shard_world import APPLY, AVERAGE, MERGE, spec, table
from support.waiting import eventually
from support.worker_sessions import crew
from typer.testing import CliRunner

import psengine
from psengine.cli.main import build_app
from psengine.errors import ConfigurationError, SnapshotError
from psengine.parameter_server.client.operation import wait_all
from psengine.parameter_server.server.settings import make_settings
from psengine.protocol.rows import pack_rows, unpack_rows

STEPS, BAD_STEP, SIZES = 12, 9, {"wide": (300, 401), "bias": (401,), "running": (7,)}


def server(directory, shards=2, **options):
    """At a path, so that the next one is found there."""
    options = {"durability": "log", "keep_history": True, "snapshot_interval_s": 0.0, "lease_s": 20.0, **options}
    return running_server(bind=f"ipc://{directory}.socket", shards=shards, snapshot_dir=directory, **options)


def told(*arguments):
    """(exit code, what was printed)"""
    result = CliRunner().invoke(build_app("replay"), ["replay", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout


def train(client, rank, answers, barrier):
    generator = torch.Generator().manual_seed(rank)
    tensors = {name: torch.ones(size) for name, size in SIZES.items()}
    trained = [tensors["wide"], tensors["bias"]]
    optimizer = torch.optim.Adam([{"params": [one], "lr": 0.01} for one in trained])
    client.register(tensors, optimizer)
    for step in range(1, STEPS + 1):
        if step == STEPS // 2:
            barrier.wait()  # a server ends meanwhile
        optimizer.param_groups[0]["lr"] = 0.01 / step
        gradients = {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}
        if (rank, step) == (1, BAD_STEP):
            gradients["wide"][3, 5:8] = float("nan")
        answers[rank, step] = client.push_pull(gradients)
        if rank == 0:
            client.session.administer({"action": "snapshot"})


@pytest.mark.parametrize("options", [{}, {"max_staleness": 1}, {"compress": "int8"}], ids=["async", "bounded", "int8"])
def test_a_run_of_two_servers_is_told_again_bit_for_bit(tmp_path, options):
    directories, answers, barrier = [tmp_path / "a", tmp_path / "b"], {}, Barrier(3)
    with ExitStack() as stack:
        first, second = stack.enter_context(server(directories[0])), ExitStack()
        addresses = [first.addresses[0], second.enter_context(server(directories[1])).addresses[0]]
        stack.callback(second.close)
        clients = [stack.enter_context(psengine.connect(addresses, rank=rank, **options)) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(train, client, rank, answers, barrier) for rank, client in enumerate(clients)]
            barrier.wait()
            second.close()
            second.enter_context(server(directories[1]))
            for run in runs:
                run.result()
        with psengine.connect(addresses, role="reader") as reader:
            last = reader.pull()
        code, text = told(*directories, "--out", tmp_path / "last")
    assert_equal(load_file(tmp_path / "last"), last)
    assert code == 1
    assert f"worker 1's push of step {BAD_STEP} is the first with values that are not finite" in text
    rows = {(int(row[0]), int(row[1])): row for row in map(str.split, text.splitlines()[1:-1])}
    assert rows.keys() == answers.keys()
    # A NaN spoils the 256 values that share its scale.
    assert rows[1, BAD_STEP][5:] == ["256" if "compress" in options else "3", "0", "refused:", "non_finite"]
    assert {row[5] for place, row in rows.items() if place != (1, BAD_STEP)} == {"0"}
    for named in (directories[:1], [directories[0], directories[0]]):
        with pytest.raises(SnapshotError, match=r"not the directories of all .*, each once \(expected 4 shards, got"):
            told(*named)
    if not options:
        for rank, step in ((0, 3), (1, STEPS // 2), (1, BAD_STEP)):
            code, text = told(*directories, "--until-push", f"{rank}:{step}", "--out", tmp_path / "then")
            assert code == (step == BAD_STEP)
            assert_equal(load_file(tmp_path / "then"), answers[rank, step])
        generator = torch.Generator().manual_seed(0)
        gradient = [torch.randn(size, generator=generator) for size in SIZES.values()][:2]
        assert float(rows[0, 1][3]) == pytest.approx(
            torch.cat([one.flatten() for one in gradient]).norm().item(), rel=1e-3
        )


def test_merges_and_a_table_are_told_again(tmp_path):
    specs = [spec(0, 50), table(1, dim=4, parts=1)]
    optimizer = torch.optim.SGD([torch.zeros(50)], lr=0.5, momentum=0.9)
    with server(tmp_path / "a", shards=1) as one:
        with crew(one.addresses, 2, specs, rule=MERGE) as workers:
            for worker in workers:
                worker.attach_optimizer(specs[:1], optimizer, {"p0": optimizer.param_groups[0]["params"][0]})
            then = {}
            for step in range(1, 5):
                answers = [torch.empty(50) for _ in workers]
                pushes = []
                for rank, worker in enumerate(workers):
                    gradient = torch.randn(50, generator=torch.Generator().manual_seed(10 * step + rank))
                    pushes.append(worker.push(0, gradient, [answers[rank]]))
                    rows = pack_rows(torch.tensor([3, 10 * step + rank]), gradient[:8].view(2, 4))
                    pushes.append(worker.push(1, rows, (), rows=2, lr=0.1 if step > 1 else 0.0, divisor=2))
                wait_all(pushes)
                then[step] = answers[1]
            ids, rows = unpack_rows(workers[0].pull(1, scan=0, most=100).wait(), 4)
        _, text = told(tmp_path / "a", "--job", "job", "--until-push", "1:3", "--out", tmp_path / "then")
        rows_told = [line.split() for line in text.splitlines()[1:]]
        assert sorted(row[:2] for row in rows_told) == [[str(rank), str(step)] for rank in (0, 1) for step in (1, 2, 3)]
        assert float(rows_told[0][4]) == pytest.approx(then[1].norm().item(), rel=1e-3)
        told(tmp_path / "a", "--job", "job", "--out", tmp_path / "last")
    assert torch.equal(load_file(tmp_path / "then")["p0"], then[3])
    found = load_file(tmp_path / "last")
    assert torch.equal(found["p0"], then[4])
    order, there = ids.argsort(), found["users.ids"].argsort()
    assert torch.equal(found["users.ids"][there], ids[order])
    assert torch.equal(found["users.rows"][there], rows[order])


def test_a_follower_s_directory_tells_the_run_across_a_takeover(tmp_path):
    def replicated(name, **options):
        options |= {"election": f"launcher={tmp_path}/election", "durability": "log+replica"}
        return server(tmp_path / name, shards=1, **options)

    answers, weights = [], torch.ones(1000)
    with ExitStack() as stack:
        leader = stack.enter_context(replicated("a"))
        follower = stack.enter_context(replicated("b", follow=leader.addresses[0]))
        eventually(lambda: follower.status()["replica"]["is_in_sync"])
        client = stack.enter_context(psengine.connect(f"{leader.addresses[0]}|{follower.addresses[0]}", rank=0))
        client.register({"w": weights}, torch.optim.Adam([weights]))
        for step in range(6):
            if step == 3:
                leader.kill()
            answers.append(client.push_pull({"w": torch.full((1000,), step - 2.5)})["w"].clone())
    for step in (2, 6):
        told(tmp_path / "b", "--until-push", f"0:{step}", "--out", tmp_path / "then")
        assert torch.equal(load_file(tmp_path / "then")["w"], answers[step - 1])


def test_what_cannot_be_told_is_said_in_a_sentence(tmp_path):
    def refused(words, *arguments, error=SnapshotError):
        with pytest.raises(error, match=words):
            told(*arguments)

    weights = torch.ones(4)
    with server(tmp_path / "a", shards=1) as one:
        for job, rule in (("job", APPLY), ("averages", AVERAGE)):
            with crew(one.addresses, 1, rule=rule, job=job) as [worker]:
                if rule is APPLY:
                    worker.attach_optimizer([spec()], torch.optim.SGD([weights], lr=0.1), {"p0": weights})
                worker.push(0, torch.ones(4), [torch.empty(4)]).wait()
    (tmp_path / "empty").mkdir()
    refused("empty has no log", tmp_path / "empty")
    refused("absent: No such file or directory", tmp_path / "absent")
    refused("nothing to tell of this run of job 'default'", tmp_path / "a")
    refused("one that averages has no gradients", tmp_path / "a", "--job", "averages")
    named = (tmp_path / "a", "--job", "job", "--until-push")
    refused(r"no push 0:2 \(expected one that psengine replay lists .* workers \[0\]", *named, "0:2")
    refused("--until-push is WORKER:N, such as 3:1742", *named, "7", error=ConfigurationError)
    refused("a directory that exists", tmp_path / "a", "--out", tmp_path / "absent" / "x", error=ConfigurationError)
    with pytest.raises(ConfigurationError, match="The history is in the log"):
        make_settings({"keep_history": True, "snapshot_dir": tmp_path})
