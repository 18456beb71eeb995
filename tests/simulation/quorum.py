"""The oracle of averages under a quorum: how many gradients end an exchange, and that it ends once they are there.

Where nobody is left who could bring a gradient, an exchange ends with those that are there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from simulation.violation import require

# The fastest worker is at most this far ahead of the slowest.
HEARD_WITHIN = 8
# (life of a server, chunk, exchange)
Exchange = tuple[int, int, int]
# (rank, nonce, chunk) of live workers -> the last exchange that they pushed to.
Pushed = Mapping[tuple[int, int, int], int]


class Quorum:
    """See the module's text.

    Args:
        size: of the quorum.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # (rank, nonce) of the workers that have brought a gradient to an exchange that has not ended.
        self._given: dict[Exchange, set[tuple[int, int]]] = defaultdict(set)
        self._ended: set[Exchange] = set()

    def begin(self, epoch: int, key: int) -> None:
        """A job began anew in the life of this server: its first exchange waits for all again."""
        self._ended = {ended for ended in self._ended if ended[:2] != (epoch, key)}
        for exchange in [known for known in self._given if known[:2] == (epoch, key)]:
            del self._given[exchange]

    def take(self, exchange: Exchange, rank: int, nonce: int) -> None:
        """A live worker has brought a gradient."""
        if exchange not in self._ended:
            self._given[exchange].add((rank, nonce))

    def end(self, exchange: Exchange, members: Mapping[int, int], pushed: Pushed) -> None:
        """The exchange has an answer; ``members``: of live workers, rank -> nonce."""
        if exchange in self._ended:
            return
        self._ended.add(exchange)
        _, key, sequence = exchange
        given = [rank for rank, nonce in self._given.pop(exchange, ()) if members.get(rank) == nonce]
        missing = [rank for (rank, _, known), last in pushed.items() if known == key and last < sequence]
        is_quorum = len(given) >= min(self._size, len(members)) or not missing
        where = f"exchange {sequence} of chunk {key}"
        require(is_quorum, "{} ended with gradients of workers {}, and without {}", where, given, missing)

    def tick(self, epoch: int, members: Mapping[int, int], pushed: Pushed) -> None:
        """Once the job is under way, and every live worker was heard, no exchange waits that has its quorum."""
        for (life, key, sequence), givers in self._given.items():
            if life != epoch or not any(ended[:2] == (life, key) for ended in self._ended):
                continue
            last = {rank: number for (rank, _, known), number in pushed.items() if known == key}
            if last.keys() != members.keys() or sequence - min(last.values(), default=0) > HEARD_WITHIN:
                continue
            here = [rank for rank, nonce in givers if members.get(rank) == nonce and last[rank] == sequence]
            is_due = here and len(here) >= min(self._size, len(members))
            require(not is_due, "exchange {} of chunk {} has gradients of workers {}, and waits", sequence, key, here)
