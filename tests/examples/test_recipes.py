"""docs/recipes and examples/recipes: each script beside its native twin, or beside one process."""

import contextlib
import gc
import importlib
import io
import multiprocessing
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_ranks, set_torchrun_variables

import psengine

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "recipes"
PAGES = ROOT / "docs" / "recipes"

Run = tuple[str, ...]  # a script's name and its arguments

PAIRS: list[Run] = [
    ("initial_weights",),
    ("initial_weights", "--outputs", "3"),
    ("sum_and_mean",),
    ("samplers_and_epochs",),
    ("evaluation",),
    ("unused_parameters",),
    ("two_tower", "--steps", "12", "--users", "5000"),
    ("several_devices",),
    ("several_devices", "--inside", "replicas"),
]
SYNC_BATCH_NORM: list[Run] = [("sync_batch_norm",), ("sync_batch_norm", "--frozen")]
UNEVEN: list[Run] = [("uneven_devices",), ("uneven_devices", "--native")]
SERVER: list[Run] = [("cpu_parameters",), ("cpu_parameters", "--native")]
ELASTIC: Run = ("elastic", "--epochs", "1")
HYBRID: list[Run] = [("hybrid",), ("hybrid", "--native")]


def native(run: Run) -> Run:
    return (*run, "--native")


def play(rank: int, world_size: int, runs: list[tuple[Run, int]]) -> dict[Run, Any]:
    """Run scripts one after the other, each as torchrun would start it: an agent's store, and these variables."""
    sys.path.insert(0, str(SCRIPTS))
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # loaders have processes
    results: dict[Run, Any] = {}
    for run, port in runs:
        set_torchrun_variables(rank, world_size, port, CUDA_VISIBLE_DEVICES="")
        with contextlib.redirect_stdout(io.StringIO()):
            results[run] = importlib.import_module(run[0]).main(list(run[1:]))
        gc.collect()  # a model that outlives its group keeps threads that may wait for ever
        psengine.shutdown()
    return results


def play_together(world_size: int, runs: list[Run]) -> list[dict[Run, Any]]:
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in runs]
    ports = [store.port for store in stores]
    return run_ranks(play, world_size, list(zip(runs, ports, strict=True)), init_group=False)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[Run, Any]]:
    return play_together(2, [*PAIRS, *map(native, PAIRS), *SYNC_BATCH_NORM, *UNEVEN])


@pytest.fixture(scope="module")
def one_process() -> dict[Run, Any]:
    uneven = [(*run, "--shares", "1") for run in UNEVEN]
    return play_together(1, [*SYNC_BATCH_NORM, *uneven, ("several_devices",), *SERVER])[0]


def is_close(values: list[list[float]], expected: list[list[float]], tolerance: float) -> bool:
    """float32 sums associate otherwise in one process, and each step adds a little to that."""
    pair = (torch.cat([torch.tensor(each).double() for each in lists]) for lists in (values, expected))
    return torch.allclose(*pair, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("run", PAIRS, ids=" ".join)
def test_a_recipe_and_its_native_twin_agree(two_ranks, run):
    for result in two_ranks:
        assert result[run] == result[native(run)], "to the last bit"
        assert result[run] == two_ranks[0][run], "between two ranks"


def test_only_pretrained_weights_that_fit_are_loaded(two_ranks):
    whole, other_head = (two_ranks[0][run] for run in PAIRS[:2])
    assert list(other_head) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert other_head["0.weight"] == whole["0.weight"]
    assert torch.tensor(other_head["2.weight"]).shape == (3, 32)


def test_sums_within_two_ranks_average_to_fourteen(two_ranks):
    for result in two_ranks:
        assert list(result["sum_and_mean",].values()) == [1.5, 3.0, 3.0, 14.0]


def test_evaluation_counts_every_sample_once(two_ranks):
    assert [result["evaluation",]["count"] for result in two_ranks] == [203, 203]


@pytest.mark.parametrize("run", SYNC_BATCH_NORM, ids=" ".join)
def test_synchronised_batch_norm_is_one_process_s(two_ranks, one_process, run):
    for result in two_ranks:
        assert is_close(result[run], one_process[run], 1e-9)
    assert one_process[SYNC_BATCH_NORM[0]] != one_process[SYNC_BATCH_NORM[1]]


def test_uneven_shares_train_like_one_process(two_ranks, one_process):
    for run in UNEVEN:
        for result in two_ranks:
            assert is_close(result[run], one_process[(*UNEVEN[0], "--shares", "1")], 1e-4)


def test_split_models_train_like_one_process(two_ranks, one_process):
    assert is_close(two_ranks[0]["several_devices",], one_process["several_devices",], 1e-5)


def test_weights_in_the_server_are_master_weights_by_hand(one_process):
    ours, by_hand = (one_process[run] for run in SERVER)
    assert is_close(ours, by_hand, 1e-5)


@pytest.mark.slow  # tests/strategies/test_elastic.py has such bits
def test_two_workers_have_the_bits_of_four_native_ranks():
    expected = play_together(4, [native(ELASTIC)])[0][native(ELASTIC)]
    assert [result[ELASTIC] for result in play_together(2, [ELASTIC])] == [expected, expected]


def test_a_hybrid_of_four_ranks_trains_like_one_process(one_process):
    results = play_together(4, HYBRID)
    for result in results:
        assert result[HYBRID[0]] == result[HYBRID[1]], "to the last bit: two replicas"
    assert results[0] == results[2], "replicas are equal"
    assert results[1] == results[3]
    parts = [{name: torch.tensor(value) for name, value in results[part]["hybrid",].items()} for part in (0, 1)]
    together = [
        torch.cat([part["weight_in"] for part in parts]),
        torch.cat([part["bias_in"] for part in parts]),
        torch.cat([part["weight_out"] for part in parts], dim=1),
        parts[0]["bias_out"],
    ]
    assert is_close([tensor.flatten().tolist() for tensor in together], one_process["several_devices",], 1e-5)


def test_pages_and_scripts_name_each_other():
    pages = {page.stem: page.read_text() for page in PAGES.glob("*.md")}
    for script in SCRIPTS.glob("*.py"):
        if page := re.search(r"docs/recipes/(\w+)\.md", script.read_text()):  # generic PyTorch has none
            assert f"examples/recipes/{script.name}" in pages[page[1]]
    for name, text in pages.items():
        for path in re.findall(r"(?<!tests/)examples/(?:recipes/)?\w+\.py", text):
            assert (ROOT / path).exists(), f"{name}.md names {path}"
