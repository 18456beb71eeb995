"""What a client knows of one server: its addresses, of which one leads, and the highest term that it has heard. Pure.

named       tcp://a:7077|tcp://b:7077         places   [tcp://a:7077, tcp://a:7078]   of the shards of who leads
RESUMED     shards of who leads                        [tcp://b:7077, tcp://b:7078]   of its follower's
replicas    those of its follower
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from psengine.parameter_server.client.addresses import is_address
from psengine.protocol.messages import Message, MessageType

# Who leads, its follower, those that are named, and some that these have replaced.
MAX_PLACES = 6
_GREETS = (MessageType.WELCOME, MessageType.RESUMED)
_ANSWERS_GREETING = (*_GREETS, MessageType.ERROR)
_WILDCARD = re.compile(r"tcp://(\*|0\.0\.0\.0|\[::\]):")


class KnownServer:
    """See the module's text; all of a client's channels to one server share it.

    Args:
        name: the server's, with "|" between the addresses of its first shard.

    Attributes:
        places: of each process that may lead the addresses of its shards, as far as they are known; who was heard to
            lead last is the first.
        term: the highest.
    """

    def __init__(self, name: str) -> None:
        self.places = [[address] for address in name.split("|")]
        self.term = 0
        self._shards = self._epoch = 0  # of who leads; 0: not known

    def known(self, shard: int) -> list[str]:
        """The addresses of a shard; a server without a term has no second."""
        places = self.places[:1] if self._epoch and not self.term else self.places
        return [place[shard] for place in places if shard < len(place)]

    def next_to(self, address: str, shard: int) -> str:
        """Where to look for a shard after ``address``."""
        known = self.known(shard) or [address]
        return known[(known.index(address) + 1) % len(known)] if address in known else known[0]

    def objection(self, message: Message) -> str:
        """Why who sends this is not to be believed, though it leads; "" where it is."""
        if message.term < self.term:
            return f"it leads no more (expected term {self.term}, got {message.term})"
        if message.type not in _ANSWERS_GREETING:
            return ""
        if message.term == self.term > 0 and 0 not in (self._epoch, message.epoch) and message.epoch != self._epoch:
            return f"it is another server, because this one's lead in term {self.term} was another process"
        shards = len(message.body.get("shards", ())) or self._shards
        if self._shards not in (0, shards) and len(self.places) > 1:
            return f"it is another server (expected {self._shards} shards, got {shards})"
        return ""

    def heard(self, message: Message, address: str, shard: int) -> bool:
        """Take what who leads says of itself; whether others should look for the server where this came from."""
        greets, replicas = message.type in _GREETS, message.body.get("replicas", ())
        if message.term == self.term and not greets and not replicas:
            return False
        before = self.term, self.places[0]
        if greets or message.term > self.term:
            self._epoch = message.epoch if greets else 0
        self.term = message.term
        place = next((place for place in self.places if address in place), [address])
        if message.type is MessageType.RESUMED and shard == 0:
            # A wildcard host stands for the one at which this client reached the server.
            host, shards = address.rpartition(":")[0], message.body["shards"]
            place = [address, *(_WILDCARD.sub(f"{host}:", one) for one in shards[1:])]
            self._shards = len(shards)
        if all(map(is_address, replicas)):
            self._learn(replicas)
        self._learn(place)
        return before != (self.term, self.places[0])

    def _learn(self, place: Sequence[str]) -> None:
        """Put it first."""
        if place:
            others = [other for other in self.places if other[0] != place[0]]
            self.places = [list(place), *others][:MAX_PLACES]
