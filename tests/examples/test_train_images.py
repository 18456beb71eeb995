"""examples/train_images.py as its users start it, and its parts, down to the IDX reader."""

from __future__ import annotations

import functools
import gzip
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.examples import EXAMPLES, Ended, example, idx, run_main, write_images, write_split
from support.processes import run_ranks
from support.server_process import running_server
from torch import nn
from torch.utils.data import TensorDataset

import psengine
from psengine.environment.installation import install_command

idx_images, train_images = map(example, ("idx_images", "train_images"))


@pytest.fixture(scope="module")
def small_images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "images")


# ------------------------------------------------------------------------------------------------- as users start it


def test_the_default_images_are_scikit_learns_digits():
    data = train_images.load_data(None)
    assert (len(data.train), len(data.test), data.classes) == (1437, 360, 10)


def test_compare_finds_no_difference_and_the_checkpoint_is_a_plain_modules(tmp_path, small_images):
    checkpoint = tmp_path / "small.pt"
    options = ("--data", small_images, "--checkpoint", checkpoint, "--epochs", 2, "--max-steps", 7, "--accumulate", 2)
    options += ("--compare", "--scheduler", "cosine", "--report-every", 3)
    finished, other = run_ranks(run_main, 2, "train_images", *options)
    assert finished.code == other.code == 0, finished.errors + other.errors
    assert "Warning" not in finished.errors
    assert finished.output.count("largest difference: parameters 0, buffers 0") == 2
    assert finished.output.count("equal to the last bit after 7 steps") == 1
    assert finished.output.count("epoch 1  step 3/5") == 1
    assert other.output == ""  # rank 0 alone speaks
    printed = re.findall(r"accuracy .*?\)", finished.output)[-1]

    assert list(tmp_path.iterdir()) == [checkpoint]
    network = train_images.ImageClassifier(classes=10)
    network.load_state_dict(torch.load(checkpoint, weights_only=True))
    images, labels = train_images.load_data(small_images).test.tensors
    correct = int((network.eval()(images).argmax(dim=1) == labels).sum())
    assert train_images.describe_accuracy(correct, len(labels)) == printed
    [evaluated] = run_ranks(run_main, 1, "train_images", "--data", small_images, "--evaluate", checkpoint)
    assert evaluated.output.strip() == printed


def compare_with_a_warmer_native(rank: int, world_size: int, images: Path) -> Ended:
    make_native_replica = train_images.make_native_replica

    def warmer(network, options, *arguments):
        options.learning_rate *= 2
        return make_native_replica(network, options, *arguments)

    train_images.make_native_replica = warmer
    return run_main(rank, world_size, "train_images", "--data", images, "--compare", "--max-steps", 2)


def test_compare_ends_with_an_error_where_models_differ(small_images):
    [finished] = run_ranks(compare_with_a_warmer_native, 1, small_images)
    assert finished.code == 1
    (error,) = finished.errors.splitlines()
    assert "differ after epoch 1, step 2 (expected no difference, got largest difference: parameters" in error


def test_a_loss_that_is_not_finite_stops_all_ranks(small_images):
    options = ("--data", small_images, "--learning-rate", "1e30", "--report-every", 1)
    first, second = run_ranks(run_main, 2, "train_images", *options)
    assert first.code == second.code == 1
    assert first.errors == second.errors
    assert re.search(r"not finite \(expected .*, got (nan|inf) on rank \d, epoch 1, step \d+\)", first.errors)


def test_ranks_share_a_users_error(tmp_path):
    first, second = run_ranks(run_main, 2, "train_images", "--data", tmp_path / "nowhere")
    assert first.code == second.code == 2
    assert "nowhere: expected a directory with IDX files, got no such directory" in first.errors
    assert second.errors == ""


# ------------------------------------------------------------------------------------------------- parameter servers


@pytest.fixture(scope="module")
def server():
    with running_server() as running:
        yield running


@pytest.mark.slow
def test_compare_with_an_embedded_server(small_images):
    options = ("--data", small_images, "--strategy", "sync-server", "--compare", "--epochs", 1, "--max-steps", 6)
    finished, _ = run_ranks(run_main, 2, "train_images", *options)
    assert finished.code == 0, finished.errors
    # A sum of two has one order only.
    assert "largest difference: parameters 0, buffers 0" in finished.output
    assert "are equal within 0.05 after 6 steps" in finished.output


def test_ranks_train_through_an_embedded_server(small_images):
    options = ("--data", small_images, "--strategy", "async", "--epochs", 2)
    first, second = run_ranks(run_main, 2, "train_images", *options)
    assert (first.code, first.errors) == (0, "")
    assert second == Ended(0, "", "")
    assert re.findall(r"epoch (\d)/2  step (\d+)  loss", first.output) == [("1", "10"), ("2", "20")]
    assert float(re.findall(r"accuracy (.*?)%", first.output)[-1]) > 80


def join_by_server(rank: int, world_size: int, *options: object, **variables: str) -> Ended:
    """A process without a group; in the others' job by its variables alone."""
    variables |= {"PSENGINE_WORKER": str(rank), "PSENGINE_WORKERS": str(world_size)}
    return run_main(rank, world_size, "train_images", "--epochs", 1, *options, **variables)


@pytest.mark.parametrize("strategy", [pytest.param("sync-server", marks=pytest.mark.slow), "async:max_staleness=4"])
def test_processes_that_only_a_server_joins(server, small_images, strategy):
    job = f"single-{strategy}"
    join = functools.partial(join_by_server, PSENGINE_SERVERS=server.addresses[0], PSENGINE_JOB=job)
    options = ("--data", small_images, "--strategy", strategy)
    main, other = run_ranks(join, 2, "--epochs", 2, *options, init_group=False)
    assert (main.code, other.code) == (0, 0), main.errors + other.errors
    assert other.output == "", "worker 0 prints for the job"
    assert "world size 1" in main.output
    assert "step 20  loss" in main.output  # each epoch is dealt out to both
    # Chance is 10; how stale the gradients are, and so how far two half epochs come, follows the machine's load.
    assert float(re.findall(r"accuracy (.*?)%", main.output)[-1]) > 50
    [status] = server.job(job)
    assert status["members"] == 0
    if strategy.startswith("async"):
        assert status["version_max"] == 2 * 20
        [refused] = run_ranks(join, 1, *options, "--compare", init_group=False)
        assert (refused.code, refused.errors.count("\n")) == (2, 1)
        assert "--compare: " in refused.errors
        assert "(expected sync or sync-server, got async)" in refused.errors


# ------------------------------------------------------------------------------------------------------------ options


@pytest.fixture
def main(monkeypatch, capsys):
    """Run the script's main() in this process: main(*options) -> (exit code, lines on stderr)."""

    def run(*options: object) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / "train_images.py"), *map(str, options)])
        exit_code = train_images.main()
        return exit_code, capsys.readouterr().err.splitlines()

    yield run
    psengine.shutdown()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--batch-size", -3], "argument --batch-size: expected a whole number above 0, got '-3'"),
        (["--learning-rate", "nan"], "argument --learning-rate: expected a finite number above 0, got 'nan'"),
        (["--momentum", 1], "argument --momentum: expected a number from 0 to below 1, got '1'"),
        (["--momentum", 0.5, "--optimizer", "adamw"], "leave it out with --optimizer adamw"),
        (["--batch", 3], "unrecognized arguments: --batch 3"),
        (["--evaluate", "a.pt", "--compare"], "leave out --compare"),
        (["--strategy", "telepathy", "--data", "{images}"], "telepathy"),
        (["--data", "{tmp}/garbage"], "garbage: expected a directory with IDX files, got a file"),
        (["--checkpoint", "{tmp}/nowhere/a.pt"], "a.pt: expected a file name in a writable directory"),
        (["--pretrained", "{tmp}/nowhere.pt"], "nowhere.pt: expected a readable checkpoint, got No such file"),
        (["--evaluate", "{tmp}/garbage"], "garbage: expected a checkpoint of weights only, got: "),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(main, tmp_path, small_images, options, expected):
    (tmp_path / "garbage").write_bytes(b"not a checkpoint")
    exit_code, lines = main(*(str(option).format(tmp=tmp_path, images=small_images) for option in options))
    assert exit_code == 2
    (line,) = lines
    assert line.startswith("train_images.py: error: ")
    assert expected in line


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(train_images.UserError, match=re.escape(install_command("examples"))):
        train_images.load_data(None)


# ----------------------------------------------------------------------------------------------------------- training


def test_micro_batches_of_different_sizes_make_the_step_of_one_batch():
    images, labels = torch.randn(7, 3), torch.tensor([0, 1, 0, 1, 1, 0, 1])

    def step(sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        model.no_sync = nullcontext
        replica = train_images.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), scheduler=None)
        batches = [list(batch) for batch in zip(images.split(sizes), labels.split(sizes), strict=True)]
        return train_images.train_step(replica, batches, torch.device("cpu")), model.weight.detach()

    torch.testing.assert_close(step([3, 3, 1]), step([7]))


def _evaluate(rank: int, world_size: int) -> tuple[int, int]:
    torch.manual_seed(rank)  # rank 0's network is the one that counts
    context = psengine.init()
    network = train_images.ImageClassifier(3).to(context.device)
    return train_images.evaluate_together(network, _random_images(), context)


def _random_images() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (7, 1, 8, 8), dtype=torch.uint8, generator=generator)
    return TensorDataset(images, torch.randint(3, (7,), generator=generator))


def test_evaluation_counts_every_image_once():
    torch.manual_seed(0)
    correct = train_images.count_correct(
        train_images.ImageClassifier(3), *_random_images().tensors, torch.device("cpu")
    )
    assert run_ranks(_evaluate, 3) == [(correct, 7)] * 3


# -------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture
def weights_path(tmp_path):
    torch.manual_seed(1)
    path = tmp_path / "weights.pt"
    train_images.save(train_images.ImageClassifier(classes=5), path)
    return path


CPU = torch.device("cpu")


def test_pretrained_weights_of_other_classes_keep_the_new_head(weights_path):
    weights = torch.load(weights_path, weights_only=True)
    same, other = train_images.ImageClassifier(classes=5), train_images.ImageClassifier(classes=3)
    head = other.head.weight.clone()
    for network in (same, other):
        train_images.load_pretrained(network, weights_path, CPU)
    torch.testing.assert_close(same.state_dict(), weights)
    assert torch.equal(other.head.weight, head)
    features = {name: tensor for name, tensor in weights.items() if name.startswith("features.")}
    torch.testing.assert_close({name: other.state_dict()[name] for name in features}, features)


def test_weights_that_do_not_fit(weights_path):
    weights = torch.load(weights_path, weights_only=True)
    weights["features.0.weight"] = torch.zeros(8, 1, 3, 3)
    del weights["features.1.bias"]
    weights["stem.weight"] = torch.zeros(2)
    torch.save(weights, weights_path)
    with pytest.raises(train_images.UserError) as caught:
        train_images.load_pretrained(train_images.ImageClassifier(classes=5), weights_path, CPU)
    message = str(caught.value)
    assert "features.0.weight (expected shape (16, 1, 3, 3), got shape (8, 1, 3, 3))" in message
    assert "features.1.bias (expected shape (16,), got none)" in message
    assert "stem.weight (expected none, got shape (2,))" in message


def test_a_failed_save_leaves_the_earlier_checkpoint(weights_path, monkeypatch):
    before = weights_path.read_bytes()

    def full_disk(state: object, file: object) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(train_images.UserError, match=r"could not be written: .*No space left"):
        train_images.save(train_images.ImageClassifier(classes=5), weights_path)
    assert weights_path.read_bytes() == before
    assert list(weights_path.parent.iterdir()) == [weights_path]


# ---------------------------------------------------------------------------------------------------------- IDX files


@pytest.fixture
def images():
    return torch.randint(256, (11, 9, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[False, True], ids=["plain", "gzip"])
def compressed(request):
    return request.param


def test_round_trip(tmp_path, images, compressed):
    write_split(tmp_path, "train", images, compress=compressed)
    write_split(tmp_path, "t10k", images[:4], compress=compressed)
    read_images, read_labels = idx_images.read_split(tmp_path, "train")
    assert torch.equal(read_images, images)
    assert read_labels.tolist() == [*range(10), 0]
    data = train_images.load_data(tmp_path)
    assert (len(data.train), len(data.test), data.classes) == (11, 4, 10)
    assert data.train.tensors[0].shape == (11, 1, 9, 8)


BYTES = torch.zeros(2, 3, 4, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (idx(BYTES)[:-1], "expected 24 bytes of values, as the header says (2, 3, 4), got 23"),
        (b"P5 2 3 255 " + bytes(20), "expected an IDX file (magic 00000803), got magic 50352032"),
        (idx(BYTES, shape=(2**32 - 1,) * 3), "expected at most 1073741824 bytes of values, got a header of"),
        (gzip.compress(idx(BYTES), mtime=0)[:-12], "expected an intact gzip stream, got: "),
    ],
    ids=["cut short", "magic", "size", "gzip"],
)
def test_damaged_files(tmp_path, content, expected):
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(idx_images.IdxError) as caught, idx_images.IdxFile(path, 3) as file:
        file.read()
    assert str(caught.value).startswith(f"{path}: ")
    assert expected in str(caught.value)
