"""examples/evaluate_from_server.py beside a real server and a training run."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import pytest
import torch
from support.examples import Ended, example, run_main, write_images
from support.processes import run_ranks
from support.server_process import running_server

import psengine

evaluate_from_server = example("evaluate_from_server")


@pytest.fixture(scope="module")
def server():
    with running_server(shards=2) as running:
        yield running


@pytest.fixture(scope="module")
def small_images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "images")


@pytest.fixture
def main(server, small_images, monkeypatch, capsys):
    """Run the script's main() in this process: main(*options) -> (exit code, lines on stdout, lines on stderr)."""

    def run(*options: object) -> tuple[int, list[str], list[str]]:
        arguments = ["--server-address", server.addresses[0], "--data", str(small_images), *map(str, options)]
        monkeypatch.setattr(sys, "argv", ["evaluate_from_server.py", *arguments])
        exit_code = evaluate_from_server.main()
        captured = capsys.readouterr()
        return exit_code, captured.out.splitlines(), captured.err.splitlines()

    return run


def read_or_train(rank: int, world_size: int, images: Path, **variables: str) -> Ended:
    if rank == 0:
        return run_main(0, 1, "evaluate_from_server", "--data", images, "--every", 0.1, **variables)
    return run_main(0, 1, "train_images", "--data", images, "--strategy", "async", "--epochs", 2, **variables)


def test_it_follows_a_training_run_to_its_end(server, small_images, main):
    job = {"PSENGINE_SERVERS": server.addresses[0], "PSENGINE_JOB": "followed"}
    reader, worker = run_ranks(functools.partial(read_or_train, **job), 2, small_images, init_group=False)
    assert worker.code == 0, worker.errors
    assert (reader.code, reader.errors) == (0, "")

    *lines, last = reader.output.splitlines()
    assert last == "all workers have left"
    versions = [int(re.match(r"version (\d+)  accuracy ", line)[1]) for line in lines]
    assert versions == sorted(set(versions))
    # One worker's 40 steps; what the servers hold at the end is what it had.
    assert versions[-1] == 40
    accuracy = re.findall(r"accuracy .*", worker.output)[-1]
    assert lines[-1] == f"version 40  {accuracy}"

    # The servers still have the weights.
    assert main("--job", "followed", "--every", 0.1, "--times", 1) == (0, [lines[-1], last], [])


def test_bad_options_are_one_line(main):
    exit_code, _, [error] = main("--every", 0)
    assert exit_code == 2
    assert error == "evaluate_from_server.py: error: argument --every: expected a finite number above 0, got '0'"


def test_a_job_that_nobody_trains(main):
    exit_code, _, [error] = main("--job", "nobody", "--timeout", 1.0)
    assert exit_code == 2
    assert "--job nobody: nobody trains it (expected a worker within --timeout 1 s)" in error


def test_a_job_whose_servers_hold_no_weights(server, main):
    with psengine.connect(server.addresses[0], job="averages") as client:
        client.register({"weight": torch.zeros(3)})
        exit_code, _, [error] = main("--job", "averages")
    assert exit_code == 2
    assert "its servers hold no weights (expected a job of strategy async, got one that averages" in error


def test_a_job_of_another_network(server, main):
    weight = torch.zeros(3, requires_grad=True)
    with psengine.connect(server.addresses[0], job="other") as client:
        client.register({"weight": weight}, torch.optim.SGD([weight], lr=0.1))
        exit_code, _, [error] = main("--job", "other")
    assert exit_code == 2
    assert "tensor 'features.0.weight' is no tensor of this job" in error
