"""Who takes part, as the coordinator says it, and what must hold of the numbers of lives, processes and views."""

from __future__ import annotations

from typing import Any

from psengine.protocol.messages import Message, MessageType
from psengine.protocol.views import View, view_of
from simulation import inspection
from simulation.violation import require


class Views:
    """Those of a job.

    Attributes:
        members: of the newest view: (incarnation, first step) by rank.
        came: by rank, the incarnation that was in a view last.
        epochs: by server, of the newest life that led.
    """

    def __init__(self, world) -> None:
        self._world = world
        self.members: dict[int, tuple[int, int]] = {}
        self.came: dict[int, int] = {}
        self._published: dict[tuple[int, int], View] = {}
        self._members_since: list[tuple[float, frozenset[int]]] = []
        self._out_s: dict[int, float] = {}  # by incarnation, when it was dropped from a view
        self._held: dict[tuple[int, int], tuple[int, int]] = {}  # (life of a server, shard) -> its view
        self.epochs: dict[int, int] = {}
        self._processes: dict[tuple[int, int], Any] = {}  # (rank, incarnation)
        self._newest: dict[int, tuple[int, int]] = {}  # rank -> its newest process, and that one's incarnation

    def begin_anew(self) -> None:
        """Another coordinator leads, and knows nobody."""
        self.members = {}
        self._newest.clear()

    # ---- processes ---------------------------------------------------------------------------------------------

    def welcomed(self, process, message: Message) -> None:
        """A process got an incarnation, or said HELLO again."""
        incarnation = message.incarnation
        if message.body["state"] == "reserved" or not incarnation:
            return
        owner = self._processes.setdefault((message.worker, incarnation), process)
        same = "incarnation {} of worker {} is of processes {} and {}"
        require(owner is process, same, incarnation, message.worker, owner.number, process.number)
        number, newest = self._newest.get(message.worker, (-1, 0))
        if process.number >= number:  # one that cannot prove its incarnation gets another
            grows = incarnation > newest or (process.number, incarnation) == (number, newest)
            require(grows, "worker {} got incarnation {} after {}", message.worker, incarnation, newest)
            self._newest[message.worker] = process.number, incarnation

    def process(self, rank: int, incarnation: int) -> Any:
        """Who has this incarnation."""
        return self._processes.get((rank, incarnation))

    def member(self, rank: int) -> Any:
        """Who takes part with this rank, or did last."""
        return self._processes.get((rank, self.came.get(rank, 0)))

    def has(self, process) -> bool:
        """Whether this process takes part, as the coordinator knows it, or the newest view while there is none."""
        lead = self._world.lead
        state = inspection.worker_state(lead, self._world.name, process.rank, process.incarnation) if lead.is_up else ""
        return state != "gone" and self.process(process.rank, self.members.get(process.rank, (0, 0))[0]) is process

    def was_out(self, process, since_s: float) -> bool:
        """Whether this process has been put out after that time."""
        incarnations = [number for (_, number), one in self._processes.items() if one is process]
        return any(self._out_s.get(number, -1.0) >= since_s for number in incarnations)

    def is_out(self, process) -> bool:
        """Whether this process was put out, and did not come back."""
        present = {incarnation for incarnation, _ in self.members.values()}
        return process.incarnation in self._out_s and process.incarnation not in present

    def least_members(self, since_s: float) -> frozenset[int]:
        """The ranks that have been members at all times since then."""
        views = [ranks for _, ranks in self._members_since[-1:]]
        views += [ranks for time_s, ranks in self._members_since if time_s >= since_s]
        return frozenset.intersection(*views) if views else frozenset()

    # ---- servers -----------------------------------------------------------------------------------------------

    def server_started(self, server) -> None:
        """A life begins; where something is kept, after those before it of its server and of that one's follower."""
        epoch, newest = server.epoch, self.epochs.get(server.index, 0)
        require(epoch not in self.epochs.values(), "epoch {} is not the first of its number", epoch)
        require(epoch > newest or self._world.cluster.scenario.durability == "memory", "{} follows {}", epoch, newest)
        self.epochs[server.index] = epoch

    def applied(self, server, shard: Any) -> None:
        """A shard has taken a message."""
        number, place = inspection.view_number(shard, self._world.number), (server.epoch, shard.index)
        known = self._held.get(place, (0, 0))
        require(number >= known, "shard {} went from view {} to {}", shard.index, known, number)
        self._held[place] = number

    def coordinated(self, server, message: Message | None, outgoing: list[Any]) -> None:
        """The coordinators of a server say this, to a message or because time has passed."""
        if message is not None and message.body.get("what") == "registered":
            self._check_registered(message.body, outgoing)
        for one in outgoing:
            if one.message.type is MessageType.VIEW:
                self._publish(view_of(one.message.body))

    def _check_registered(self, body: dict[str, Any], outgoing: list[Any]) -> None:
        """What a coordinator takes for registered is at the shards."""
        servers = [self._world.cluster.leaders[index] for index in self._world.run.servers]
        shards = [server.shards[0] for server in servers] + [one for server in servers for one in server.shards[1:]]
        for shard, epoch, count in zip(shards, body["epochs"], body["chunks"], strict=True):
            here = inspection.chunk_count(shard, self._world.number)
            is_here = here >= count or shard.epoch != epoch or not outgoing
            require(is_here, "a model is registered, and {} of {} chunks are at shard {}", here, count, epoch)

    def _publish(self, view: View) -> None:
        known = self._published.get((view.number, view.epoch))
        if known is not None:
            is_same = known.members == view.members and known.shards == view.shards
            require(is_same, "view {} is {} and {}", view.number, known, view)
            return
        self._published[view.number, view.epoch] = view
        higher = [number for number, epoch in self._published if number > view.number and epoch == view.epoch]
        require(not higher, "view {} follows {}", view.number, higher)
        members = {one.rank: (one.incarnation, one.first_step) for one in view.members}
        now_s = self._world.clock.now_s
        # Who came back at once, within one view, begins with another step.
        for member in set(self.members.values()) - set(members.values()):
            self._out_s[member[0]] = now_s
        self.members = members
        self.came.update({one.rank: one.incarnation for one in view.members})
        self._members_since.append((now_s, frozenset(members)))
