"""Samples and random numbers of virtual workers: the same whoever plays them, and wherever batches are fetched."""

import functools
import itertools
import math
import random
import signal
from collections.abc import Callable, Sequence

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import forkserver, in_ranks
from support.waiting import eventually
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as loader_process

import psengine
from psengine.data.elastic import SamplePlan, random_key, set_random_state
from psengine.environment.processes import has_exited
from psengine.errors import ArgumentTypeError, ConfigurationError, ReductionError, ReplicaMismatchError


class ScriptedPlayer:
    """Plays by ``plan``: for each step whom it expects to play, and who comes unexpectedly."""

    def __init__(self, virtual_workers: int, plan: Callable[[int], tuple[list[int], list[int]]], first_step: int = 1):
        self.virtual_workers, self.first_step = virtual_workers, first_step
        self._plan, self._now = plan, 1
        self._left: list[int] = []
        self.played: list[tuple[int, int]] = []
        self.recorded: list[float] = []
        self.playing: int | None = None
        self.has_left = False

    def enter(self, facts):
        self.facts = facts
        self._now = self.first_step
        return self.first_step

    def begin_step(self, step):
        self._now = step
        self._left = [*self._plan(step)[0], *self._plan(step)[1]]
        self._values = [math.nan] * self.virtual_workers

    def upcoming(self):
        return self._plan(self._now)[0]

    def next_virtual_worker(self):
        if not self._left:
            self.recorded, self.playing = self._values, None
            return None
        self.playing = self._left.pop(0)
        self.played.append((self._now, self.playing))
        return self.playing

    def record(self, value):
        self._values[self.played[-1][1]] = value

    def leave(self):
        self.has_left = True


def plays(*virtual_workers: int) -> Callable[[int], tuple[list[int], list[int]]]:
    return lambda step: (list(virtual_workers), [])


class Augmented:
    """Random numbers of all three kinds beside each sample's index."""

    def __init__(self, length: int = 29):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), numpy.random.rand(), random.random()], dtype=torch.float64)


class AugmentedTogether(Augmented):
    """The same, with a method for several samples."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def collate_with_noise(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.stack(list(samples)), torch.rand(1, 4, dtype=torch.float64)])


def loader_for(
    player: ScriptedPlayer, dataset: object = None, batch_size: int = 2, **options
) -> psengine.ElasticLoader:
    options = {"seed": 5, "collate_fn": collate_with_noise, **options}
    if options.get("num_workers"):
        options["multiprocessing_context"] = "fork"
    loader = psengine.ElasticLoader(dataset or Augmented(), batch_size, **options)
    loader._player = player
    return loader


def train(player: ScriptedPlayer, epochs: int = 2, **options) -> dict[object, torch.Tensor]:
    """Every batch and the random numbers of its forward, by (step, virtual worker); and those between batches."""
    loader = loader_for(player, **options)
    found: dict[object, torch.Tensor] = {}

    def draw(*key: object) -> None:
        found[key] = torch.tensor([torch.rand(()).item(), numpy.random.rand(), random.random()], dtype=torch.float64)

    for epoch in loader.epochs(epochs):
        draw("epoch", epoch)
        for step in loader.steps(epoch):
            draw("begin", step.number)
            for batch in step.batches:
                key = player.played[-1]
                found[key] = batch
                draw("forward", *key)
            draw("end", step.number)
    assert player.has_left
    return found


def assert_equal(some: dict[object, torch.Tensor], others: dict[object, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    for key, value in some.items():
        assert torch.equal(value, others[key]), key


@functools.cache
def reference() -> dict[object, torch.Tensor]:
    """One worker plays four virtual workers; all is fetched in its process."""
    return train(ScriptedPlayer(4, plays(0, 1, 2, 3)))


@settings(max_examples=200, deadline=None)
@given(
    virtual_workers=st.integers(1, 7),
    batch_size=st.integers(1, 5),
    beyond=st.integers(0, 120),
    epoch=st.integers(0, 2),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_each_sample_is_taken_once_in_an_epoch(virtual_workers, batch_size, beyond, epoch, shuffle, drop_last):
    global_batch = virtual_workers * batch_size
    length = beyond + (global_batch if drop_last else virtual_workers)
    plan = SamplePlan(length, virtual_workers, batch_size, seed=3, shuffle=shuffle, drop_last=drop_last)
    steps = [[plan.samples(step, v) for v in range(virtual_workers)] for step in plan.steps_of(epoch)]
    assert all(plan.epoch_of(step) == epoch for step in plan.steps_of(epoch))

    taken = list(itertools.chain.from_iterable(itertools.chain.from_iterable(steps)))
    assert len(set(taken)) == len(taken)
    assert len(taken) == (length - length % global_batch if drop_last else length)
    if not shuffle:
        assert taken == list(range(len(taken)))
    sizes = [[len(samples) for samples in step] for step in steps]
    assert all(size == batch_size for step in sizes[:-1] for size in step)
    assert max(sizes[-1]) - min(sizes[-1]) <= 1
    assert min(sizes[-1]) >= 1
    assert sum(sizes[-1]) < global_batch + virtual_workers
    if drop_last:
        assert set(sizes[-1]) == {batch_size}


def test_permutations_differ_by_epoch_and_seed_and_may_be_asked_for_in_any_order():
    def order(plan: SamplePlan, epoch: int) -> list[int]:
        return [index for step in plan.steps_of(epoch) for v in range(2) for index in plan.samples(step, v)]

    plans = [SamplePlan(40, 2, 4, seed=seed, shuffle=True, drop_last=False) for seed in (0, 0, 1)]
    forth = [order(plans[0], epoch) for epoch in (0, 1, 2)]
    back = [order(plans[1], epoch) for epoch in (2, 1, 0)]
    assert forth == back[::-1]
    other = [order(plans[2], epoch) for epoch in (0, 1, 2)]
    assert len({tuple(one) for one in forth + other}) == 6


def test_batches_and_forwards_have_random_numbers_of_their_own():
    """The first three numbers are of torch, NumPy and Python; a batch also has its samples' numbers."""
    drawn = [number for key, values in reference().items() if values.dim() == 1 for number in values.tolist()]
    drawn += [
        number for values in reference().values() if values.dim() == 2 for number in values[:, 1:].flatten().tolist()
    ]
    assert len(set(drawn)) == len(drawn)
    # 29 samples: three full steps of eight, and one of five, in each of two epochs.
    assert {key[0] for key in reference() if key[0] not in ("epoch", "begin", "forward", "end")} == set(range(1, 9))


@pytest.mark.parametrize("dataset", [Augmented(), AugmentedTogether()])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "prefetch_factor": 7}])
def test_where_batches_are_fetched_changes_no_bits(dataset, options):
    assert_equal(train(ScriptedPlayer(4, plays(0, 1, 2, 3)), dataset=dataset, **options), reference())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_who_plays_changes_no_bits(num_workers):
    """Worker 1 dies in step 3; worker 0 computes its batches then and from there on, until a joiner comes in step 6."""

    def survivor(step: int) -> tuple[list[int], list[int]]:
        return ([0, 1], []) if step < 3 else ([0, 1], [3, 2]) if step == 3 else ([0, 1, 2, 3], [])

    def survivor_until_the_join(step: int) -> tuple[list[int], list[int]]:
        return survivor(step) if step < 6 else ([1, 0], [])

    survives, dies, joins = (
        train(ScriptedPlayer(4, plan, first_step), num_workers=num_workers)
        for plan, first_step in ((survivor_until_the_join, 1), (plays(2, 3), 1), (plays(2, 3), 6))
    )
    before = {key: value for key, value in dies.items() if isinstance(key[0], int) and key[0] < 3}
    before |= {key: value for key, value in dies.items() if key[0] == "forward" and key[1] < 3}
    assert_equal(before | survives | joins, reference())
    for part in (survives, dies, joins):
        assert all(torch.equal(value, reference()[key]) for key, value in part.items())


def test_who_is_taken_over_within_a_step_is_not_fetched_again():
    """Of what was fetched ahead, batches that another worker computes now are passed over."""

    class Once(ScriptedPlayer):
        def begin_step(self, step):
            super().begin_step(step)
            if step == 2:
                self._left = [0, 3]  # a joiner takes 1 and 2

    found = train(Once(4, plays(0, 1, 2, 3)), num_workers=1)
    assert (2, 1) not in found
    assert all(torch.equal(value, reference()[key]) for key, value in found.items())


def test_what_is_expected_is_fetched_by_loader_processes():
    class Where(Augmented):
        def __getitem__(self, index):
            worker = get_worker_info()
            return torch.full((4,), -1.0 if worker is None else worker.id, dtype=torch.float64)

    def plan(step: int) -> tuple[list[int], list[int]]:
        return ([0, 1], [2] if step == 2 else []) if step < 3 else ([0, 1, 2], [])

    found = train(ScriptedPlayer(4, plan), dataset=Where(), num_workers=2, epochs=1)
    here = {key for key, value in found.items() if len(value) > 1 and value.dim() > 1 and value[0, 0] == -1}
    assert here == {(2, 2)}


class Threads(Augmented):
    def __getitem__(self, index):
        return torch.full((4,), float(torch.get_num_threads()), dtype=torch.float64)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_datasets_run_with_one_thread(num_workers):
    """A sum of many numbers has other bits with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = train(ScriptedPlayer(4, plays(1)), dataset=Threads(), num_workers=num_workers)
        assert found[1, 1][0, 0] == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_job_goes_on_at_its_epoch_and_step(num_workers):
    later = train(ScriptedPlayer(4, plays(0, 1, 2, 3), first_step=7), num_workers=num_workers)
    assert ("epoch", 0) not in later
    assert min(key[0] for key in later if isinstance(key[0], int)) == 7
    assert all(torch.equal(value, reference()[key]) for key, value in later.items())


def test_a_job_that_is_over_has_no_epochs():
    player = ScriptedPlayer(4, plays(0), first_step=9)
    assert list(loader_for(player).epochs(2)) == []
    assert player.has_left


def test_keys_are_the_same_everywhere():
    assert random_key("forward", 0, 17, 3) == 9438140002993786251
    set_random_state("forward", 0, 17, 3)
    assert (torch.initial_seed(), random.random()) == (random_key("forward", 0, 17, 3), 0.5614443086537756)


def test_tensors_of_a_batch_are_aligned_as_torch_aligns_them():
    """A tensor over NumPy's memory is not, and would make other bits of a matrix product than from another process."""

    def misaligned(samples):
        memory = numpy.zeros(4 * len(samples) + 64)
        offset = next(i for i in range(1, 9) if memory[i:].ctypes.data % 64)
        view = memory[offset : offset + 4 * len(samples)].reshape(-1, 4)
        view[:] = numpy.stack([sample.numpy() for sample in samples])
        return {"x": torch.from_numpy(view), "names": ["a"], "n": 3}

    for num_workers in (0, 1):
        player = ScriptedPlayer(1, plays(0))
        loader = loader_for(player, batch_size=8, collate_fn=misaligned, num_workers=num_workers)
        for epoch in loader.epochs(1):
            for step in loader.steps(epoch):
                for batch in step.batches:
                    assert batch["x"].data_ptr() % 64 == 0
                    assert (batch["names"], batch["n"]) == (["a"], 3)
                    assert len(batch["x"]) in (8, 5)


class Raises(Augmented):
    def __getitem__(self, index):
        raise LookupError(f"no sample {index}")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_s_error_reaches_the_user(num_workers):
    with pytest.raises(LookupError, match="no sample"):
        train(ScriptedPlayer(4, plays(0, 1)), dataset=Raises(), num_workers=num_workers)


def train_for_ever(pids) -> None:
    loader_process.MP_STATUS_CHECK_INTERVAL = 600.0  # torch's own watch, by which they end some seconds later
    loader = loader_for(ScriptedPlayer(4, plays(0)), num_workers=2)
    for epoch in loader.epochs(1):
        for step in loader.steps(epoch):
            for _ in step.batches:
                iterator = loader._batches._fetched
                pids.send([worker.pid for worker in iterator._workers])
                signal.pause()


def test_loader_processes_die_with_a_parent_that_is_killed():
    """They hold its sockets, by which other workers see that it died."""
    receiving, sending = forkserver.Pipe(duplex=False)
    trainer = forkserver.Process(target=train_for_ever, args=(sending,))
    trainer.start()
    pids = receiving.recv()
    trainer.kill()
    trainer.join()

    eventually(lambda: all(map(has_exited, pids)))


def test_leaving_a_step_s_batches_is_an_error_at_the_next_use():
    for use in ("steps", "epochs", "batches", "again"):
        loader = loader_for(ScriptedPlayer(4, plays(0, 1)))
        epochs = loader.epochs(1)
        steps = loader.steps(next(epochs))
        step = next(steps)
        for _ in step.batches:
            break
        uses = {
            "steps": lambda steps=steps: next(steps),
            "epochs": lambda epochs=epochs: next(epochs),
            "batches": lambda step=step: next(step.batches),
            "again": lambda loader=loader: next(loader.steps(0)),
        }
        expected = "taken already" if use == "batches" else "step 1 was left before its batches ended"
        with pytest.raises(ReductionError, match=expected):
            uses[use]()
        with pytest.raises(ReductionError, match="expected a call after the loop"):
            step.mean()


def test_leaving_an_epoch_s_steps_is_an_error_at_the_next_epoch():
    loader = loader_for(ScriptedPlayer(4, plays(0, 1)))
    epochs = loader.epochs(2)
    for step in loader.steps(next(epochs)):
        list(step.batches)
        if step.number == 2:
            break
    with pytest.raises(ReductionError, match=r"expected steps\(0\), in which step 3 is next, got steps\(1\)"):
        next(loader.steps(1))
    with pytest.raises(ReductionError, match=r"before its last step \(expected 4 steps, got 2\)"):
        next(epochs)


def test_a_training_ends_once():
    loader = loader_for(ScriptedPlayer(4, plays(0, 1)))
    for epoch in loader.epochs(1):
        for step in loader.steps(epoch):
            list(step.batches)
    with pytest.raises(ReductionError, match="the training is over"):
        next(loader.epochs(2))


def test_the_mean_of_what_was_recorded():
    player = ScriptedPlayer(4, plays(2, 0, 1, 3))
    loader = loader_for(player)
    for epoch in loader.epochs(1):
        for step in loader.steps(epoch):
            with pytest.raises(ReductionError, match="inside the loop"):
                step.record(1.0)
            for _ in step.batches:
                v = player.played[-1][1]
                step.record(-1)
                step.record(torch.tensor([[0.1 * v]], dtype=torch.float64, requires_grad=True))
                if step.number == 2:
                    with pytest.raises(ReductionError, match="after the loop"):
                        step.mean()
                    with pytest.raises(ArgumentTypeError, match="one real number"):
                        step.record(torch.ones(2))
            assert step.mean() == (0.0 + 0.1 + 0.2 + 0.1 * 3) / 4
            with pytest.raises(ReductionError, match="inside the loop"):
                step.record(1.0)


def test_facts_that_workers_have_alike():
    player = ScriptedPlayer(4, plays(0))
    next(loader_for(player, batch_size=3).epochs(1))
    assert player.facts["ElasticLoader's batch_size"] == "3"
    assert player.facts["the length of ElasticLoader's dataset"] == "29"
    assert player.facts["ElasticLoader's seed"] == "5"


class Endless(IterableDataset):
    def __iter__(self):
        return iter(int, 1)


def test_what_is_refused():
    with pytest.raises(ArgumentTypeError, match=r"map-style dataset with a length \(got Endless"):
        psengine.ElasticLoader(Endless())
    with pytest.raises(ConfigurationError, match="batch_size >= 1, got 0"):
        psengine.ElasticLoader(range(4), 0)
    with pytest.raises(ConfigurationError, match=r"at least 4 samples .* got 3\)"):
        next(loader_for(ScriptedPlayer(4, plays(0)), dataset=Augmented(3)).epochs(1))
    with pytest.raises(ConfigurationError, match=r"at least 8 samples .* batch_size=2 .* got 7\)"):
        _ = loader_for(ScriptedPlayer(4, plays(0)), dataset=Augmented(7), drop_last=True).steps_per_epoch
    with pytest.raises(ValueError, match="prefetch_factor"):
        psengine.ElasticLoader(range(4), prefetch_factor=2)


def test_a_process_alone_plays_one_virtual_worker():
    loader = psengine.ElasticLoader(range(10), 4, shuffle=False)
    assert loader.steps_per_epoch == 3
    batches = [batch.tolist() for epoch in loader.epochs(1) for step in loader.steps(epoch) for batch in step.batches]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@in_ranks(2)
def test_each_rank_of_a_process_group_plays_one(rank, world_size):
    loader = psengine.ElasticLoader(range(11), 2, shuffle=False)
    batches, means = [], []
    for epoch in loader.epochs(1):
        for step in loader.steps(epoch):
            for batch in step.batches:
                batches.append(batch.tolist())
                step.record(0.1 + 0.2 * rank)
            means.append(step.mean())
    assert batches == ([[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]])[rank]
    assert means == [(0.1 + (0.1 + 0.2)) / 2] * 3


@in_ranks(2)
def test_ranks_that_disagree_are_told_both_values(rank, world_size):
    with pytest.raises(ReplicaMismatchError, match="ElasticLoader's seed"):
        next(psengine.ElasticLoader(range(11), 2, seed=rank).epochs(1))
