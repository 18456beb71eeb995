"""Which worker plays which virtual worker. Pure: every worker computes the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def deal(virtual_workers: int, workers: Sequence[int], former: Mapping[int, int]) -> dict[int, int]:
    """Return by virtual worker who plays it; each of ``workers`` plays as many as any other, or one more.

    Args:
        virtual_workers: how many there are, at least as many as ``workers``.
        workers: numbers of those who take part.
        former: by virtual worker, who played it until now. Whoever still takes part keeps what its load allows.
    """
    least, more = divmod(virtual_workers, len(workers))
    wanted = {one: [v for v in range(virtual_workers) if former.get(v) == one] for one in workers}
    # Those with the most to keep get one more, so that few change hands; of equals those that come first.
    by_load = sorted(workers, key=lambda one: -len(wanted[one]))
    loads = {one: least + (place < more) for place, one in enumerate(by_load)}
    owners = {v: one for one in workers for v in wanted[one][: loads[one]]}
    free = [v for v in range(virtual_workers) if v not in owners]
    for one in workers:
        missing = loads[one] - min(loads[one], len(wanted[one]))
        owners |= dict.fromkeys(free[:missing], one)
        free = free[missing:]
    return dict(sorted(owners.items()))
