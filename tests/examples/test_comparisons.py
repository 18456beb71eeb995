"""The examples that compare: each is run as its own main program in real ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from support.examples import Ended, example, run_main, write_images
from support.processes import run_ranks


@pytest.fixture(scope="module")
def small_images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "images")


def test_every_strategy_is_compared_with_native_in_a_table_and_a_plot(tmp_path, small_images):
    plot = tmp_path / "made" / "losses.png"
    options = ("--data", small_images, "--epochs", 2, "--plot", plot, "--strategies", "sync,async:max_staleness=2")
    main, other = run_ranks(run_main, 2, "compare_strategies", *options)
    assert (main.code, other.code, other.output) == (0, 0, ""), main.errors + other.errors
    rows = {line.split()[0]: line for line in main.output.splitlines() if "%" in line}
    assert list(rows) == ["native", "sync", "async:max_staleness=2"]
    assert "0 (same bits)" in rows["sync"]
    assert "same bits" not in rows["async:max_staleness=2"]
    assert "0.2 for async:max_staleness=2" in main.output
    assert all(float(re.search(r"([\d.]+)%", row)[1]) > 60 for row in rows.values())
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_sync_that_is_not_native_is_a_failure(capsys):
    report = example("comparison_report")
    comparison = example("compare_strategies")

    def made(strategy: str, weight: float, loss: float = 0.5):
        training = comparison.Training(
            losses=[[1.0]],
            finished_s=[[0.1]],
            state={"w": torch.tensor([weight])},
            seconds=0.1,
            staleness={},
            test_losses=torch.tensor([loss, loss]),
            is_correct=torch.tensor([True, False]),
        )
        return comparison.Outcome(strategy, 0.1, [training], test_images=2)

    def is_accepted(*outcomes: object) -> bool:
        return report.print_table(list(outcomes), reference="native", momentum=0.9)

    assert is_accepted(made("native", 1.0), made("sync", 1.0))
    assert not is_accepted(made("native", 1.0), made("sync", 1.0 + 2**-20))
    assert not is_accepted(made("native", 0.0), made("sync", -0.0))
    assert is_accepted(made("native", 1.0), made("async", 2.0, loss=0.75))
    printed = capsys.readouterr().out
    assert printed.count("same bits") == 1
    assert "+0.2500" in printed
    assert "50.0% \u00b135.4" in printed  # the square root of a quarter over two images


WRONG = [
    ("compare_strategies", ("--epochs", "1", "--strategies", "sink"), "unknown strategy"),
    ("compare_strategies", ("--slow-ms", "-1"), "at least 0"),
    ("batch_size_study", ("--batch-sizes", "32,x"), "a whole number above 0, got 'x'"),
    ("batch_size_study", ("--batch-sizes", "1000000"), "share each batch evenly"),
    ("train_gpt", ("--width", "6"), "a multiple of 4, got 6"),
    ("train_gpt", ("--text", "/nonexistent"), "at least 100 kB"),
]


def run_all_wrong(rank: int, world_size: int, images: Path) -> list[Ended]:
    data = {"train_gpt": ()}
    return [run_main(rank, world_size, name, *data.get(name, ("--data", images)), *more) for name, more, _ in WRONG]


def test_wrong_options_are_one_line_and_exit_code_2(small_images):
    (results,) = run_ranks(run_all_wrong, 1, small_images)
    for result, (_, _, complaint) in zip(results, WRONG, strict=True):
        assert result.code == 2
        assert complaint in result.errors
        assert result.errors.count("\n") == 1


def native_and_ours(rank: int, world_size: int, options: tuple[object, ...]) -> list[Ended]:
    return [run_main(rank, world_size, "train_gpt", *more, *options) for more in ((), ("--native",))]


def test_the_gpt_takes_native_ddps_steps_and_writes():
    options = ("--steps", 4, "--evaluate-every", 2, "--layers", 1, "--width", 32, "--context", 32, "--batch-size", 4)
    (ours, native), _ = run_ranks(native_and_ours, 2, options)
    assert ours.code == native.code == 0
    without_rate = [re.sub(r"[\d,]+ bytes/s", "", result.output) for result in (ours, native)]
    assert without_rate[0] == without_rate[1]
    assert "step 4/4" in ours.output
    assert "def main(" in ours.output


def study_twice(rank: int, world_size: int, images: Path, directory: Path) -> list[Ended]:
    options = ("--data", images, "--batch-sizes", "64,128", "--runs", 1, "--epochs", 1)
    options += ("--plot", directory / "sizes.png")
    return [
        run_main(
            rank, world_size, "batch_size_study", *options, "--strategy", name, "--json", directory / f"{name}.json"
        )
        for name in ("sync", "native DDP")
    ]


def test_the_batch_size_study_can_be_repeated_over_native_ddp(tmp_path, small_images):
    results, _ = run_ranks(study_twice, 2, small_images, tmp_path)
    assert [result.code for result in results] == [0, 0], results[0].errors
    tables = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("sync", "native DDP")]
    assert [row["batch_size"] for row in tables[0]] == [64, 128]
    assert [row["learning_rate"] for row in tables[0]] == [0.005, 0.01]
    assert [row["accuracies"] for row in tables[0]] == [row["accuracies"] for row in tables[1]]
    assert "epochs to it" in results[0].output
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")


def test_the_target_of_a_batch_size_is_the_first_epoch_that_reaches_it():
    row = example("batch_size_study").Row(
        64, 0.1, 10, [[0.5, 0.8, 0.7], [0.6, 0.9, 0.9], [0.4, 0.7, 0.8]], [3.0, 1.0, 2.0]
    )
    assert row.curve == [0.5, 0.8, 0.8]
    assert row.seconds == 2.0
    assert [row.epochs_to(accuracy) for accuracy in (0.5, 0.6, 0.8, 0.81)] == [1, 2, 2, None]
