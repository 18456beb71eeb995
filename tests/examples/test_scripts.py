"""The whole trainings of examples/: each is run as its own main program in real ranks."""

import functools
import gzip
import importlib
import io
import os
import re
import struct
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from support.processes import run_ranks
from support.server_process import running_server

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run_main(rank: int, world_size: int, module: str, *options: object, **variables: str) -> str:
    """Run the script in this rank, with ``variables`` in its environment; return what it printed."""
    os.environ.update(variables)
    sys.path.append(str(EXAMPLES))
    sys.argv = [str(EXAMPLES / f"{module}.py"), *map(str, options)]
    with redirect_stdout(io.StringIO()) as output:
        code = importlib.import_module(module).main()
    assert not code, output.getvalue()
    return output.getvalue()


def write_images(directory: Path) -> Path:
    """Ten classes of noisy images that a few steps can tell apart, as gzipped IDX files: 640 to train, 100 to test.

    Unlike the digits that the examples take by default, they are there without importing scikit-learn.
    """
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(256, (10, 8, 8), generator=generator)
    for name, count in (("train", 640), ("t10k", 100)):
        labels = torch.arange(count) % 10
        noise = torch.randint(-40, 41, (count, 8, 8), generator=generator)
        for kind, values in (("images-idx3", (classes[labels] + noise).clamp(0, 255)), ("labels-idx1", labels)):
            values = values.to(torch.uint8)
            header = bytes((0, 0, 8, values.dim())) + struct.pack(f">{values.dim()}I", *values.shape)
            (directory / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + values.numpy().tobytes()))
    return directory


@pytest.fixture(scope="module")
def small_images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "images")


def without_rates(output: str) -> str:
    return re.sub(r"[\d,.]+ (bytes/)?s\b", "", output)


def ours_and_native(rank: int, world_size: int, script: str, *options: object) -> list[str]:
    return [run_main(rank, world_size, script, *options, *more) for more in ((), ("--native",))]


def test_images_are_learnt_with_native_ddps_losses(small_images):
    (ours, native), (other, _) = run_ranks(
        ours_and_native, 2, "train_images", "--data", small_images, "--epochs", 2, "--learning-rate", 0.05
    )
    assert ours == native
    assert other == "", "rank 0 alone speaks"
    assert "640 training and 100 test images; 2 workers" in ours
    assert float(re.findall(r"accuracy (.*?)%", ours)[-1]) > 60


@pytest.mark.parametrize("strategy", ["sync", "sync:shard_optimizer=true"])
def test_a_training_goes_on_from_its_checkpoint(tmp_path, small_images, strategy):
    train = functools.partial(run_ranks, run_main, 2, "train_images", "--data", small_images, "--strategy", strategy)
    whole = train("--epochs", 3, "--checkpoint", tmp_path / "whole.pt")[0]
    train("--epochs", 1, "--checkpoint", tmp_path / "parts.pt")
    resumed = train("--epochs", 3, "--checkpoint", tmp_path / "parts.pt")[0]
    assert whole.splitlines()[-2:] == resumed.splitlines()[-2:]
    saved = [torch.load(tmp_path / f"{name}.pt", weights_only=True)["network"] for name in ("whole", "parts")]
    torch.testing.assert_close(*saved, rtol=0, atol=0)
    options = ("--data", small_images, "--checkpoint", tmp_path / "whole.pt", "--evaluate")
    [evaluated] = run_ranks(run_main, 1, "train_images", *options)
    assert re.findall(r"accuracy .*?%", evaluated) == re.findall(r"accuracy .*?%", whole)[-1:]


@pytest.fixture(scope="module")
def server():
    with running_server() as running:
        yield running


def join_by_server(rank: int, world_size: int, *options: object, **variables: str) -> str:
    """A process without a group; in the others' job by its variables alone."""
    variables |= {"PSENGINE_WORKER": str(rank), "PSENGINE_WORKERS": str(world_size)}
    return run_main(rank, world_size, "train_images", *options, **variables)


def test_processes_that_only_a_server_joins(server, small_images):
    variables = {"PSENGINE_SERVERS": server.addresses[0], "PSENGINE_JOB": "alone"}
    options = ("--data", small_images, "--strategy", "async:max_staleness=4", "--learning-rate", 0.02, "--epochs", 2)
    main, other = run_ranks(functools.partial(join_by_server, **variables), 2, *options, init_group=False)
    assert other == "", "worker 0 prints for the job"
    assert "2 workers" in main
    # Chance is 10; how stale the gradients are, and so how far two half epochs come, follows the machine's load.
    assert float(re.findall(r"accuracy (.*?)%", main)[-1]) > 30
    [status] = server.job("alone")
    assert status["version_max"] == 2 * 20


def read_or_train(rank: int, world_size: int, **variables: str) -> str:
    if rank == 0:
        return run_main(0, 1, "evaluate_from_server", "--every", 0.1, **variables)
    return run_main(0, 1, "train_images", "--strategy", "async", "--epochs", 1, **variables)


def test_an_evaluator_follows_a_training_to_its_end(server):
    variables = {"PSENGINE_SERVERS": server.addresses[0], "PSENGINE_JOB": "followed"}
    reader, worker = run_ranks(functools.partial(read_or_train, **variables), 2, init_group=False)
    *lines, last = reader.splitlines()
    assert last == "all workers have left"
    # One worker's 45 steps; what the servers hold at the end is what it had.
    assert lines[-1] == f"version 45  {re.findall(r'accuracy .*%', worker)[-1]}"


def test_the_gpt_takes_native_ddps_steps_and_writes():
    options = ("--steps", 4, "--evaluate-every", 2, "--layers", 1, "--width", 32, "--context", 32, "--batch-size", 4)
    (ours, native), _ = run_ranks(ours_and_native, 2, "train_gpt", *options)
    assert without_rates(ours) == without_rates(native)
    assert "step 4/4" in ours
    assert "def main(" in ours


def epochs(output: str) -> list[tuple[float, float]]:
    """(loss, accuracy in percent) of each epoch."""
    return [(float(loss), float(part)) for loss, part in re.findall(r"loss ([\d.]+), accuracy ([\d.]+)%", output)]


def test_two_ranks_take_one_process_s_steps_with_native_ddps_bits(small_images):
    options = ("--data", small_images, "--learning-rate", 0.1, "--epochs", 2)
    (ours, native), (other, _) = run_ranks(ours_and_native, 2, "train_mlp", *options, "--batch-size", 32)
    [alone] = run_ranks(run_main, 1, "train_mlp", *options, "--batch-size", 64)
    assert without_rates(ours) == without_rates(native), "the sum of the weights is in it"
    for (loss, accuracy), (expected_loss, expected_accuracy) in zip(epochs(ours), epochs(alone), strict=True):
        assert loss == pytest.approx(expected_loss, abs=2e-4)
        assert accuracy == pytest.approx(expected_accuracy, abs=1.0)
    assert epochs(ours)[-1][1] > 60
    assert "weights" not in other


def test_the_batch_size_study_can_be_repeated_over_native_ddp(small_images):
    options = ("--data", small_images, "--batch-sizes", 64, 128, "--runs", 1, "--epochs", 1)
    (ours, native), _ = run_ranks(ours_and_native, 2, "batch_size_study", *options)
    accuracies = re.findall(r"[\d.]+%", ours)
    assert accuracies == re.findall(r"[\d.]+%", native) != []
    assert "epochs to it" in ours


def test_the_demo_compares_strategies_in_two_settings(tmp_path):
    plot = tmp_path / "made" / "curves.png"
    options = ("--strategies", "sync;async", "--seconds", 0.3, "--runs", 1, "--plot", plot)
    main, other = run_ranks(run_main, 2, "compare_strategies", *options)
    assert other == ""
    table = main[main.index("strategy  ") :].splitlines()
    assert [line.split("  ")[0] for line in table[2:5]] == ["native DDP", "sync", "async"]
    assert max(map(len, table[:5])) <= 100
    for line in table[2:5]:
        assert len(re.findall(r"\d+\.\d%", line)) == 2, "an accuracy for each setting"
    assert "the same bits after 20 steps" in main
    assert plot.read_bytes().startswith(b"\x89PNG")
