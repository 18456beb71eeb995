"""Which samples a rank takes: shares that fit uneven devices, and an evaluation that counts each sample once.

One epoch of ``ProportionalSampler(dataset, shares=[1, 3]).batches(8)``, over the same permutation on every rank::

    permutation    p0  p1 p2 p3 p4 p5 p6 p7 │ p8  p9 ...          global batches of 8, as one process takes them
    rank 0         p0                       │ p8                  a quarter of each
    rank 1             p1 ............. p7  │     p9 ...          three quarters

All are ``torch.utils.data.DistributedSampler``s, with orders of their own: by that type Lightning and others know that
samples are dealt out already, and do not deal a rank's part out once more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence, Sized
from fractions import Fraction
from typing import Any

import torch
from torch.utils.data import DistributedSampler
from typing_extensions import override

from psengine.environment.context import group_place, job_place
from psengine.errors import ConfigurationError


class ProportionalSampler(DistributedSampler[int]):
    """Give every rank a share of each epoch: devices that are slower, or have less memory, take fewer samples.

    ``batches(global_batch_size)`` is what to train with: every rank gets the same number of batches, and the ranks'
    k-th ones together are the k-th batch of one process. Let gradients count by samples there
    (``model.batch_weight(len(batch))``), else the few samples of a small share weigh more than the others.

    Iterating over the sampler itself yields all of this rank's indices, neither padded nor dropped. With equal shares
    they are those of ``torch.utils.data.DistributedSampler`` (same seed, same epoch), but for its padding.

    Args:
        dataset: anything with a length of at least the number of ranks.
        shares: a positive number for each rank, in any unit (samples per second, gigabytes); None gives equal shares.
            The same on every rank.
        num_replicas: number of ranks; default: the workers of the job (``Context.workers``).
        rank: this one; default: ``Context.worker``. Independent workers, too, deal an epoch out among themselves.
        shuffle: permute, differently in each epoch (``set_epoch``); else keep the dataset's order.
        seed: the same on every rank.
        drop_last: let ``batches`` leave out a last global batch that is not full.

    Raises:
        ValueError: the arguments do not fit each other; ConfigurationError but for a ``rank`` outside num_replicas.
        TypeError: ``dataset`` has no length, or ``shares`` are no numbers.
    """

    dataset: Any

    def __init__(
        self,
        dataset: Sized,
        shares: Sequence[float] | None = None,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        num_replicas, rank = _place(num_replicas, rank, job_place)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]  # any Sized
        self.shares = _checked_shares(shares, num_replicas)
        if len(dataset) < num_replicas:
            raise ConfigurationError(
                f"every rank needs a sample (expected at least {num_replicas} in the dataset, got {len(dataset)})"
            )
        # The base class's count padding in.
        self.num_samples, self.total_size = len(self), len(dataset)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices, spread evenly over the permutation."""
        permutation = self.permutation()
        counts = split_proportionally(len(permutation), self.shares)
        # Where a sample would stand if each rank took its own at a constant pace; ties go to the lower rank.
        pace = [(torch.arange(count, dtype=torch.float64) + 0.5) / count for count in counts]
        owners = torch.cat([torch.full((count,), rank) for rank, count in enumerate(counts)])
        owner_of_position = owners[torch.cat(pace).argsort(stable=True)]
        return iter(permutation[owner_of_position == self.rank].tolist())

    def __len__(self) -> int:
        """How many indices this rank yields."""
        return split_proportionally(len(self.dataset), self.shares)[self.rank]

    def permutation(self) -> torch.Tensor:
        """The order of the whole dataset in this epoch, int64; the same on every rank."""
        if not self.shuffle:
            return torch.arange(len(self.dataset))
        return torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.seed + self.epoch))

    def batches(self, global_batch_size: int) -> ProportionalBatchSampler:
        """Return a batch sampler for ``DataLoader(sampler=..., batch_size=None)``, or for ``batch_sampler=...``.

        Lightning refuses the second form, unless it is given ``use_distributed_sampler=False``.

        Args:
            global_batch_size: samples of all ranks' k-th batches together.
        """
        return ProportionalBatchSampler(self, global_batch_size)


class ProportionalBatchSampler(DistributedSampler[list[int]]):
    """A rank's part of each global batch; what ``ProportionalSampler.batches`` returns.

    Every rank has the same number of batches, none of them empty: a last global batch of fewer samples than ranks is
    merged into the one before.

    Args:
        sampler: says the order, the shares and the epoch.
        global_batch_size: see ``ProportionalSampler.batches``.

    Attributes:
        batch_size: samples of this rank in a full batch.

    Raises:
        ConfigurationError: fewer samples than ranks in a batch.
    """

    dataset: Any

    def __init__(self, sampler: ProportionalSampler, global_batch_size: int) -> None:
        if global_batch_size < sampler.num_replicas:
            raise ConfigurationError(
                f"every rank needs a sample of each batch (expected a global_batch_size of at least"
                f" {sampler.num_replicas}, the number of ranks, got {global_batch_size})"
            )
        # Without the base class's own attributes: what has a batch_size and a drop_last, Lightning takes for a
        # BatchSampler that it may make anew around another sampler. Else it names use_distributed_sampler=False.
        self.sampler = sampler
        self.dataset, self.num_replicas, self.rank = sampler.dataset, sampler.num_replicas, sampler.rank
        self.global_batch_size = global_batch_size
        self.batch_size = split_proportionally(global_batch_size, sampler.shares)[sampler.rank]

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's indices of each global batch."""
        split = functools.cache(lambda size: split_proportionally(size, self.sampler.shares))
        sizes = self._global_sizes()
        for batch in self.sampler.permutation()[: sum(sizes)].split(sizes):
            yield batch.split(split(len(batch)))[self.rank].tolist()

    def __len__(self) -> int:
        """How many batches an epoch has; the same on every rank."""
        return len(self._global_sizes())

    @override
    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def _global_sizes(self) -> list[int]:
        full, rest = divmod(len(self.sampler.dataset), self.global_batch_size)
        sizes = [self.global_batch_size] * full
        if rest == 0 or self.sampler.drop_last:
            return sizes
        if sizes and rest < self.num_replicas:
            return [*sizes[:-1], sizes[-1] + rest]
        return [*sizes, rest]


class EvaluationSampler(DistributedSampler[int]):
    """Deal a dataset out to the ranks in order, each sample once: nothing is padded, dropped or shuffled.

    ``torch.utils.data.DistributedSampler`` repeats samples until all ranks have equally many, so that an accuracy over
    all ranks counts some twice. Here counts may differ by one, and a rank may have no sample at all: do nothing
    collective inside the loop (call ``model.module``, whose forward exchanges no buffers), and add up after it with
    ``psengine.sum``. accelerate would deal a rank's part out again: leave the loader out of its ``prepare``.

    Args:
        dataset: anything with a length.
        num_replicas: number of ranks; default: of the default process group, in which ``psengine.sum`` adds up, else
            of the launcher's world. So an independent worker evaluates all of it.
        rank: this one; default likewise.
    """

    dataset: Any

    def __init__(self, dataset: Sized, num_replicas: int | None = None, rank: int | None = None) -> None:
        num_replicas, rank = _place(num_replicas, rank, group_place)
        super().__init__(dataset, num_replicas, rank, shuffle=False)  # type: ignore[arg-type]  # any Sized
        self.num_samples, self.total_size = len(self), len(dataset)

    def __iter__(self) -> Iterator[int]:
        """Yield every ``num_replicas``-th index, from ``rank`` on."""
        return iter(range(self.rank, len(self.dataset), self.num_replicas))

    def __len__(self) -> int:
        """How many indices this rank yields; over all ranks they add up to the dataset's length."""
        return len(range(self.rank, len(self.dataset), self.num_replicas))


def split_proportionally(count: int, shares: Sequence[Fraction]) -> list[int]:
    """Split ``count`` samples, at least one for each of the positive ``shares``, by largest remainders."""
    counts = [1] * len(shares)
    # A rank whose share is worth less than a sample gets one. The others divide the rest, which may leave less than a
    # sample to another one.
    sharing = set(range(len(shares)))
    while True:
        rest, total = count - (len(shares) - len(sharing)), sum(shares[i] for i in sharing)
        quotas = {i: rest * shares[i] / total for i in sharing}
        too_small = {i for i in sharing if quotas[i] < 1}
        if not too_small:
            break
        sharing -= too_small
    for i in sharing:
        counts[i] = math.floor(quotas[i])
    by_remainder = sorted(sharing, key=lambda i: (counts[i] - quotas[i], i))
    for i in by_remainder[: count - sum(counts)]:
        counts[i] += 1
    return counts


def _place(num_replicas: int | None, rank: int | None, default: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """Return the number of ranks and this one: as given, else by ``default``."""
    default_rank, default_count = default() if num_replicas is None or rank is None else (rank, num_replicas)
    return default_count if num_replicas is None else num_replicas, default_rank if rank is None else rank


def _checked_shares(shares: Any, num_replicas: int) -> tuple[Fraction, ...]:
    """The shares as exact numbers, so that every rank splits alike."""
    if shares is None:
        return (Fraction(1),) * num_replicas
    shares = shares.tolist() if hasattr(shares, "tolist") else shares  # an array or tensor
    if len(shares) != num_replicas:
        raise ConfigurationError(f"shares has one number for each rank (expected {num_replicas}, got {shares})")
    for rank, share in enumerate(shares):
        if not 0 < share < math.inf:
            raise ConfigurationError(
                f"shares: every rank takes part (expected finite numbers above 0, got {share} for rank {rank}). Fix:"
                " start no process where there is nothing to do."
            )
    return tuple(Fraction(float(share)) for share in shares)
