"""psengine verify: planted differences are found where they were planted, and nothing is found where nothing is."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from support import verify_targets
from support.process_table import listeners_of
from support.processes import run_ranks

from psengine.cli.main import main
from psengine.errors import ConfigurationError
from psengine.verify import Settings, TargetError, compare
from psengine.verify.comparison import Findings, check_target, load_function, merge, train_side_by_side
from psengine.verify.differences import Tolerance, find_difference
from psengine.verify.ranks import Place, run_ranks_to_any_end

TARGETS = str(Path(verify_targets.__file__))


def sparse(indices, values, size):
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=True)


def difference_of(candidate, reference, tolerance=None):
    where = {"step": 0, "rank": 0, "kind": "parameter", "name": "w", "place": 0}
    return find_difference(candidate, reference, tolerance or Tolerance(), **where)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, math.nan, math.inf, -0.0]),
        torch.tensor([1 + 2j, complex(math.nan, 1)]),
        torch.tensor([True, False]),
        torch.tensor(3),
        torch.zeros(0),
        torch.arange(6.0, dtype=torch.bfloat16).view(2, 3).t(),
        sparse([[1, 1]], [[1.0], [2.0]], (4, 1)),
    ],
    ids=str,
)
def test_a_tensor_is_bitwise_equal_to_its_copy(tensor):
    assert difference_of(tensor.clone(), tensor) is None


def test_sparse_tensors_are_equal_where_their_sums_are():
    assert difference_of(sparse([[1, 1]], [1.0, 2.0], (4,)), sparse([[1, 2]], [3.0, 0.0], (4,))) is None
    found = difference_of(sparse([[1]], [1.0], (4,)), sparse([[1, 3]], [1.0, 2.0], (4,)))
    assert (found.index, found.absolute, found.differing) == ((3,), 2.0, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64])
def test_the_last_bit_of_one_number_is_found(dtype):
    reference = torch.linspace(1, 2, 12).to(dtype).view(3, 4)
    candidate = reference.clone()
    real = torch.view_as_real(candidate)[..., 1] if dtype.is_complex else candidate
    real[1, 2] += torch.finfo(dtype).eps * 2 if not dtype.is_complex else 1e-7
    found = difference_of(candidate, reference)
    assert (found.index, found.differing, found.within) == ((1, 2), 1, True)
    assert found.absolute == pytest.approx(float((candidate - reference).abs().max()))
    assert 0 < found.relative <= 1


@pytest.mark.parametrize(
    ("candidate", "reference", "absolute", "within"),
    [
        (torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0]), 0.0, True),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), math.inf, False),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf]), math.inf, False),
        (torch.tensor([2**53 + 1]), torch.tensor([2**53]), 1.0, False),
        (torch.tensor([True]), torch.tensor([False]), 1.0, False),
        (torch.zeros(2), torch.zeros(3), math.inf, False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), math.inf, False),
        (None, torch.zeros(2), math.inf, False),
        (torch.zeros(2), None, math.inf, False),
    ],
    ids=str,
)
def test_what_is_not_equal(candidate, reference, absolute, within):
    found = difference_of(candidate, reference)
    assert (found.absolute, found.within) == (absolute, within)
    comparison = merge([Findings(first=found)], "t", Settings())
    json.dumps(comparison.to_json(), allow_nan=False)


def test_tolerances_are_relative_to_the_largest_magnitude():
    reference = torch.tensor([1e-6, 100.0])
    candidate = reference + torch.tensor([5e-5, 0.0])
    assert difference_of(candidate, reference).within
    assert not difference_of(candidate, reference, Tolerance(absolute=1e-5)).within
    assert difference_of(candidate, reference, Tolerance(relative=1e-6)).within
    assert not difference_of(candidate, reference, Tolerance(relative=1e-7)).within


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("train", ("module:function or path/to/file.py:function", "'train'")),
        ("nowhere.py:target", ("no such file", "nowhere.py")),
        ("nowhere_at_all.part:target", ("no module 'nowhere_at_all'",)),
        (f"{TARGETS}:missing", ("no function 'missing'", "plain")),
        (f"{TARGETS}:not_a_function", ("got int",)),
        (f"{TARGETS}:with_arguments", ("is called with ()", "(width)")),
    ],
)
def test_a_target_that_is_not_there_is_named(name, texts):
    with pytest.raises(TargetError) as caught:
        load_function(name)
    assert all(text in str(caught.value) for text in texts), str(caught.value)


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        ("three_parts", ("expected 4 or 5 parts", "got 3 parts")),
        ("odd_batch", ("batch_fn", "(step, rank, world_size)")),
    ],
)
def test_what_a_target_returns_is_checked(function, texts):
    with pytest.raises(TargetError) as caught:
        check_target(getattr(verify_targets, function)(), "t")
    assert all(text in str(caught.value) for text in texts), str(caught.value)


SETTINGS = Settings(steps=5, seed=3)


def found_on_rank(rank, world_size, trials):
    """Findings of several comparisons, in order, or why there are none, each of a function in verify_targets."""
    place = Place(rank=rank, world_size=world_size, device=torch.device("cpu"))
    found = []
    for name, strategy in trials:
        try:
            strategies = [(strategy, strategy), ("native", "native")]
            found.append(train_side_by_side(place, f"{TARGETS}:{name}", strategies, 5, 3, Tolerance()))
        except ConfigurationError as error:
            found.append(str(error))
    return found


@pytest.fixture(scope="module")
def two_ranks():
    """Everything that two ranks are started for, by name."""
    names = ("plain", "awkward", "lbfgs", "thawed", "wrong_gradient", "wrong_buffer", "one_model")
    names += ("net_from_outside", "called_without_graph", "detached_loss", "no_optimizer", "wrapped_already")
    names += ("never_finite", "finite_for_two_steps")
    trials = {name: (name, "sync") for name in names}
    trials["plain, int8"] = ("plain", "sync:compress=int8")
    found = zip(*run_ranks(found_on_rank, 2, list(trials.values())), strict=True)
    return {
        name: list(reports) if isinstance(reports[0], str) else merge(reports, name, SETTINGS)
        for name, reports in zip(trials, found, strict=True)
    }


@pytest.mark.parametrize("name", ["plain", "awkward"])
def test_what_trains_alike_is_bitwise_equal(two_ranks, name):
    found = two_ranks[name]
    assert (found.verdict, found.first, found.notes) == ("bitwise equal", None, ())
    assert found.counts["gradient"] == len(list(getattr(verify_targets, name)()[0].parameters()))
    assert [entry["step"] for entry in found.history] == [-1, 0, 1, 2, 3, 4]
    # It did train: equal, but not because nothing happened.
    losses = [entry["reference_loss"] for entry in found.history[1:]]
    assert len(set(losses)) == 5
    assert losses == [entry["candidate_loss"] for entry in found.history[1:]]


@pytest.mark.parametrize(
    ("name", "kind", "note"), [("lbfgs", "loss", "LBFGS searches"), ("thawed", "gradient", "layers that are thawed")]
)
def test_a_difference_by_design_is_called_so(two_ranks, name, kind, note):
    found = two_ranks[name]
    assert (found.first.step, found.first.kind) == (0, kind)
    assert found.notes[0].startswith(f"by design: {note}")


def test_a_planted_gradient_is_found(two_ranks):
    found = two_ranks["wrong_gradient"]
    assert (found.verdict, found.agrees) == ("different", False)
    first = found.first
    assert (first.step, first.kind, first.name, first.index) == (3, "gradient", "3.weight", (1, 2))
    assert (first.differing, first.numel) == (1, 15)
    assert first == found.first_beyond
    assert first.relative == pytest.approx(0.005 / 1.005, rel=1e-3)
    # The weights differ from that step on.
    assert [entry["parameter"] > 0 for entry in found.history] == [False, False, False, False, True, True]
    json.dumps(found.to_json(), allow_nan=False)


def test_numbers_that_are_not_finite_compare_nothing_and_end_a_comparison(two_ranks):
    assert (two_ranks["never_finite"].verdict, two_ranks["never_finite"].agrees) == ("not finite", False)
    found = two_ranks["finite_for_two_steps"]
    assert found.verdict == "bitwise equal"
    assert any("step 2" in note for note in found.notes), found.notes


def test_a_planted_buffer_is_found(two_ranks):
    first = two_ranks["wrong_buffer"].first
    assert (first.step, first.kind, first.name, first.index) == (2, "buffer", "1.running_mean", (4,))
    assert first.absolute == pytest.approx(0.5)


@pytest.mark.slow
def test_the_control_begins_where_the_trainings_began():
    """In processes that trained already, the count would be past the one that makes the difference."""
    found = compare(f"{TARGETS}:counts_calls", Settings(steps=1, world_size=1))
    assert found.verdict == "different"
    assert found.is_reproducible is False
    assert "the target itself is not reproducible: native differs from itself, first at step 0, loss" in found.notes[0]
    assert "state at module level" in found.notes[1]
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("one_model", "same object twice"),
        ("wrapped_already", "the plain module"),
        ("detached_loss", "requires grad"),
        ("no_optimizer", "optimizer_fn returns an optimizer (got list)"),
        ("net_from_outside", "loss_fn computes the loss with the model it is given"),
        ("called_without_graph", "loss_fn computes the loss with the model it is given"),
    ],
)
def test_what_cannot_be_compared_is_refused_on_each_rank(two_ranks, name, text):
    assert [text in error for error in two_ranks[name]] == [True, True], two_ranks[name]


def run_command(*arguments):
    with pytest.raises(SystemExit) as end:
        main(["verify", *arguments])
    return end.value.code


def test_the_command_reports_a_planted_gradient_and_fails(capfd):
    code = run_command(f"{TARGETS}:wrong_gradient", "--steps=4", "--world-size=1", "--json")
    written = capfd.readouterr()
    assert code == 1, written.err
    found = json.loads(written.out)
    settings = found["settings"]
    assert (found["verdict"], settings["strategy"], settings["world_size"]) == ("different", "sync", 1)
    first = found["first"]
    assert (first["step"], first["kind"], first["name"], first["index"]) == (3, "gradient", "3.weight", [1, 2])
    assert found["is_reproducible"] is True
    assert "native in both places, in fresh processes, is bitwise equal" in found["notes"][0]
    assert written.err.startswith(f"loading {TARGETS} on each rank")


def test_a_crash_shows_the_users_traceback(capfd):
    """Not that of the rank which lost a peer by it, and said so first."""
    assert run_command(f"{TARGETS}:crashing") == 3
    written = capfd.readouterr()
    assert 'raise NoColumnError("no such column: price")' in written.err
    assert "rank 1 of 2 raised NoColumnError at step 1 of" in written.err
    assert "PeerLostError" not in written.err
    assert "psengine/verify" not in written.err
    assert written.out == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing"], "module:function"),
        ([], "Missing argument"),
        ([f"{TARGETS}:plain", "--strategy", "bogus"], "unknown strategy"),
        ([f"{TARGETS}:plain", "--steps", "0"], "steps is out of range (expected 1 to 1e+06, got 0)"),
        ([f"{TARGETS}:plain", "--rtol", "-1"], "rtol is out of range"),
        ([f"{TARGETS}:plain", "--device", "tpu"], "device"),
        ([f"{TARGETS}:plain", "more"], "more"),
    ],
)
def test_wrong_arguments_end_with_2_and_a_message(arguments, text, capfd):
    assert run_command(*arguments) == 2
    written = capfd.readouterr()
    assert text in written.err
    assert "Traceback" not in written.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "timeout_s", "texts"),
    [
        ("dying", 100, ("rank 1 (process ", "was ended by signal SIGKILL")),
        ("hanging", 60, ("rank 1 was at step 0 of",)),
    ],
)
def test_a_rank_that_dies_or_hangs_is_named(target, timeout_s, texts, capfd):
    assert run_command(f"{TARGETS}:{target}", "--timeout-s", str(timeout_s)) == 3
    written = capfd.readouterr().err
    assert all(text in written for text in texts)


def test_a_codec_is_different_from_its_first_gradient_on(two_ranks):
    found = two_ranks["plain, int8"]
    assert (found.verdict, found.first.step, found.first.kind) == ("different", 0, "gradient")
    assert all({"candidate_loss", "reference_loss", "parameter"} <= entry.keys() for entry in found.history[1:])


@pytest.mark.slow
def test_two_strategies_are_compared_over_one_server():
    target = f"{TARGETS}:plain"
    assert compare(target, Settings(strategy="async", world_size=1, steps=4)).verdict == "bitwise equal"
    found = compare(target, Settings(strategy="async", against="sync-server", steps=4))
    assert (found.verdict, found.is_reproducible) == ("different", True)


def test_ranks_meet_where_only_this_host_comes():
    before, heard = listeners_of(os.getpid()), set()
    run_ranks_to_any_end(
        repr, world_size=1, timeout_s=60.0, on_note=lambda _: heard.update(listeners_of(os.getpid()) - before)
    )
    assert [address for address, _ in heard] == ["0100007F"]
