"""What a seed stands for: a job, its servers, its network, and a list of faults. Shrinking takes faults away."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import NamedTuple

from psengine.protocol.messages import DURABILITY_TIERS, MAX_WORKERS


class Fault(NamedTuple):
    """One fault; what ``detail`` means depends on the kind, see ``faults.py``.

    With ``on`` it happens when a message of this type arrives somewhere, or the coordinator gets into this state, at
    ``at_s`` or later, and after ``WAITS_S`` in any case.
    """

    kind: str
    at_s: float
    lasts_s: float = 0.0
    rank: int = 0
    server: int = 0
    detail: float = 0.0
    on: str = ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a job: the first one, or one that begins the job again once those before it are over.

    Attributes:
        workers: its world size.
        servers: that it names, in this order.
        name: runs of one name are the same; "" has none.
        continues: it goes on from what others have trained.
        killed_s: when all its workers are killed, after its begin; None lets them train.
        rests_s: how long it begins after the one before.
    """

    workers: int
    servers: tuple[int, ...]
    name: str = "run"
    continues: bool = False
    killed_s: float | None = None
    rests_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """See the module's text.

    Attributes:
        seed: of every draw that is made while it runs.
        rule: "average", "apply", "merge" or "elastic".
        codec: of gradients and of the answers to them; "" has none.
        quorum: of "merge".
        grace: of "merge".
        weighs: under "average", whether gradients weigh differently.
        has_buffers: under "average", buffers and a usage map.
        leaves_residuals: under "average", whether payloads leave out a part of gradients and averages.
        max_staleness: of "apply"; None is unbounded.
        optimizer: of "apply": "SGD", "momentum" or "Adam".
        compensation: of "apply": the strength of its delay compensation.
        scales: of "apply": whether stale gradients count less.
        tables: of "apply" and "merge": the optimizer of rows, where chunks are parts of tables; "" has none.
        evicts: whether a table has no room for all of its rows.
        workers: that the job is begun with.
        joins_s: when further workers come.
        leaves: by rank, how many steps a worker takes; others take ``steps``.
        steps: of each worker ("apply", "merge"), or of the job ("average").
        shards: of each server.
        shares: how many workers, from rank 0 on, share memory with the servers.
        snapshot_s: from one snapshot to the next; None keeps none.
        keeps_log: an update is acknowledged once it is on the disk.
        has_followers: each server has one, and an update is acknowledged once that has it.
        election: who decides which of the two leads: "etcd" or "launcher".
        elector_s: the longest way of a question to the elector, and of its answer.
        asks: the tier that the job asks for; "" for none.
        room: what any shard may hold, in sizes of the model, where joiners may find no room; None is enough.
        follower_bytes: what a shard of a follower may hold, where that is less than its leader's.
        apart_s: by how much a follower's clock is ahead of its leader's.
        think_s: the longest time between two steps of a worker, or of a batch.
        virtual_workers: of "elastic"; more workers are spares.
        checkpoint_steps: of "elastic", from one checkpoint to the next; 0 writes none.
        shares_checkpoints: whether all workers have one directory for them.
        has_reader: somebody reads the values while others train.
        companion: another job at the same servers; what it says of them does not count.
        lead: of a companion: which server leads it.
        killed_s: when all workers of the first run are killed; None lets them train.
        later: runs after the first.
        is_second_model: of a companion: its workers are in the processes of this job's workers.
    """

    seed: int
    rule: str = "apply"
    codec: str = ""
    quorum: int = 1
    grace: float = 0.0
    weighs: bool = False
    has_buffers: bool = False
    leaves_residuals: bool = False
    max_staleness: int | None = None
    optimizer: str = "SGD"
    compensation: float = 0.0
    scales: bool = False
    tables: str = ""
    evicts: bool = False
    workers: int = 2
    joins_s: tuple[float, ...] = ()
    leaves: tuple[tuple[int, int], ...] = ()
    servers: int = 1
    shards: int = 1
    chunks: int = 2
    steps: int = 6
    shares: int = 0
    think_s: float = 0.4
    latency_s: tuple[float, float] = (0.001, 0.02)
    lease_s: float = 2.0
    tick_s: float = 0.1
    snapshot_s: float | None = None
    keeps_log: bool = False
    has_followers: bool = False
    election: str = ""
    elector_s: float = 0.0
    asks: str = ""
    room: float | None = None
    follower_bytes: int | None = None
    apart_s: float = 0.0
    virtual_workers: int = 0
    checkpoint_steps: int = 0
    shares_checkpoints: bool = False
    has_reader: bool = False
    companion: Scenario | None = None
    lead: int = 0
    is_second_model: bool = False
    killed_s: float | None = None
    later: tuple[Run, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def heartbeat_s(self) -> float:
        """A quarter of the lease."""
        return self.lease_s / 4

    @property
    def durability(self) -> str:
        """The tier of its servers."""
        if self.has_followers:
            return "log+replica" if self.keeps_log else "replica"
        return "memory" if self.snapshot_s is None else "log" if self.keeps_log else "snapshot"

    @property
    def keeps_updates(self) -> bool:
        """Whether what is acknowledged survives the end of a process."""
        return self.keeps_log or self.has_followers

    @property
    def hosts(self) -> int:
        """Of servers, and their followers behind them."""
        return self.servers * (1 + self.has_followers)

    @property
    def ranks(self) -> int:
        """Workers in all."""
        return self.workers + len(self.joins_s)

    @property
    def run(self) -> Run:
        """The first."""
        servers = tuple((self.lead + index) % self.servers for index in range(self.servers))
        return Run(workers=self.workers, servers=servers, killed_s=self.killed_s)

    def steps_of(self, rank: int) -> int:
        """After which step this worker leaves."""
        return dict(self.leaves).get(rank, self.steps)


# kind -> how often it is drawn, and the bounds of how long it lasts
KINDS = {
    "break": (5, 0.0, 0.5),  # connections
    "cut": (4, 0.2, 6.0),  # nothing passes one way or both
    "cut off": (3, 1.2, 12.0),  # one worker from one server, for so many leases
    "slow": (3, 0.1, 2.0),  # connections
    "kill worker": (3, 0.1, 5.0),
    "stop worker": (3, 0.1, 6.0),
    "zombie": (2, 0.5, 6.0),  # stopped, and another process gets its rank
    "kill server": (3, 0.1, 3.0),
    "kill lead": (3, 0.1, 3.0),
    "stop server": (2, 0.1, 5.0),
    "evict": (1, 0.0, 0.0),  # by an operator
    "fsync fails": (3, 0.1, 2.0),
    "disk full": (1, 0.1, 4.0),
    "bits flip": (1, 0.0, 0.0),  # of a file
}
# Of servers that have followers; fewer of the others happen beside them.
FOLLOWER_KINDS = {
    "kill leader": (6, 0.1, 4.0),
    "kill follower": (4, 0.1, 4.0),
    "kill both": (2, 0.1, 3.0),  # the leader, and the other one later
    "stop leader": (5, 0.1, 9.0),
    "stop follower": (2, 0.1, 9.0),
    "cut servers": (5, 0.2, 9.0),  # one from the other, one way or both
    "slow servers": (5, 0.5, 3.0),  # between them
    "cut elector": (4, 0.2, 9.0),  # from one of them, one way or both
    "elector down": (3, 0.2, 6.0),
    "elector late": (3, 0.5, 6.0),
}
FOLLOWER_SEEDS = 3
FOLLOWER_MOMENTS = (
    *("FOLLOW", "RECORD", "KEPT", "Read", "Replace", "Renew", "PUSH", "UPDATED", "VIEW", "COMMIT"),
    *("registering", "open", "preparing", "joining", "resuming"),
)
# Each so many-th seed is of an elastic job, with these.
ELASTIC_SEEDS = 5
ELASTIC_KINDS = {
    "break": (2, 0.0, 0.5),
    "cut": (2, 0.2, 6.0),
    "cut workers": (3, 0.2, 6.0),  # nothing passes from one to another, one way or both
    "slow": (1, 0.1, 2.0),
    "kill worker": (8, 0.1, 5.0),
    "kill workers": (2, 0.1, 1.0),  # all of them
    "stop worker": (3, 0.1, 6.0),
    "zombie": (2, 0.5, 6.0),
    "kill lead": (4, 0.1, 3.0),
    "stop server": (2, 0.1, 5.0),
    "evict": (1, 0.0, 0.0),
    "checkpoint fails": (1, 0.1, 4.0),
    "bits of a checkpoint flip": (2, 0.1, 1.0),
}
# Messages, where the coordinator stands, and how names of operations of a group begin.
ELASTIC_MOMENTS = (
    *("HELLO", "COMMIT", "PREPARE", "VIEW", "MEET", "LEAVE", "open", "preparing", "resuming"),
    *("state", "averages", "description", "a", "barrier", "gradient", "order", "numbers", "buffers", "buffers"),
)
OF_WORKERS = ("kill worker", "stop worker", "zombie", "evict")
# In so many scenarios nobody reaches a server for two leases, and nothing else fails; in as many beside other faults.
CUTS_OF_ALL = 0.04
STRANGERS = 0.25  # the share of seeds that have one
NEWCOMERS = 0.15  # ... of elastic ones where one is first at a server that restarts
MEETINGS = 0.1  # ... where the lead dies as members meet
DAMAGE = 0.15  # ... of those with checkpoints where a bit of one flips
LITTLE_ROOM = 0.25  # in so many jobs whose servers average
LATE_COMMITS = 0.2  # in so many jobs whose servers merge, without followers
DEATHS_OF_ALL = 0.2  # ... of the others lead and workers die as a merge is answered
ANSWERS = 0.3  # with followers, a leader dies as it answers, in so many of the jobs whose servers step or merge
LONE_LEADERS = 0.15  # with followers, a leader reaches neither its follower nor the elector
OF_DISKS = ("fsync fails", "disk full", "bits flip")
READERS = 0.2  # in so many scenarios
LATER_RUNS = 0.2  # in so many scenarios
COMPANIONS = 0.2  # in so many scenarios
TABLES = 0.4  # in so many of the rules that tables have
OTHER_SEEDS = 1 << 32
FAULTY_S = 4.0
WAITS_S = 2.0
MOMENTS = (
    *("HELLO", "REGISTER", "COMMIT", "OK", "PREPARE", "VIEW", "RELEASE", "RESUME", "RESUMED", "PUSH", "UPDATED"),
    *("STORE", "STATE_WANTED", "LEAVE", "RESULT"),
)
# Where a crash, or a connection that breaks, matters most: words for messages, and for where the coordinator stands.
CRITICAL = (
    *("VIEW", "PREPARE", "RELEASE", "COMMIT", "OK"),
    *("registering", "open", "preparing", "preparing", "joining", "joining", "resuming"),
)
# "topk" keeps a part of the differences to several updates, and all that is in an average that leaves no residual.
CODECS = {
    "apply": ("bf16", "fp16", "fp32", "int8", "fp4", "onebit", "topk:ratio=0.01"),
    "merge": ("bf16", "fp16", "fp32", "int8", "fp4", "topk:ratio=0.01"),
    "average": ("bf16", "fp16", "fp32", "int8", "fp4", "topk:ratio=0.02"),
}
LOSSY_OF_AVERAGES = ("int8", "fp4", "onebit", "onebit", "topk:ratio=0.02")


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    scenario = _draw_elastic(seed) if seed % ELASTIC_SEEDS == ELASTIC_SEEDS - 1 else _draw_job(seed)
    if seed % FOLLOWER_SEEDS == FOLLOWER_SEEDS - 1:
        scenario = _with_followers(scenario)
    elif (chance := random.Random(f"cut of all {seed}").random()) < 2 * CUTS_OF_ALL:
        cut = Fault("cut all", round(0.2 + 50 * chance, 3), 2 * scenario.lease_s, detail=round(20 * chance, 3))
        # Alone it ends nobody: see ``Liveness``.
        scenario = replace(scenario, faults=(*(scenario.faults if chance > CUTS_OF_ALL else ()), cut))
    elif scenario.rule == "merge":
        scenario = _with_late_commits(scenario)
    scenario = _with_stranger(scenario)
    is_cut_off = any(one.kind == "cut off" for one in scenario.faults)
    return _asking(_with_little_room(scenario if is_cut_off else _with_later_runs(_with_companion(scenario))))


def _with_little_room(scenario: Scenario) -> Scenario:
    """Little memory, where servers average and have no other job or run: who joins may be put out for it."""
    rng = random.Random(f"room {scenario.seed}")
    is_judged_alone = any(one.kind in ("cut all", "cut off") for one in scenario.faults)
    is_other = scenario.rule != "average" or scenario.companion is not None or scenario.has_followers
    if is_other or scenario.later or is_judged_alone or rng.random() > LITTLE_ROOM:
        return scenario
    return replace(scenario, room=rng.choice((1.0, 1.0, 1.5, 2.5, 4.0)))


def _with_late_commits(scenario: Scenario) -> Scenario:
    """What workers bring is committed after a restart has lost it, and before they bring it again."""
    rng = random.Random(f"late commits {scenario.seed}")
    if rng.random() > LATE_COMMITS:
        return _with_deaths_of_all(scenario)
    slow = Fault("slow", round(rng.uniform(0.3, 2.0), 3), round(rng.uniform(2.5, 4.0), 3), detail=0.3)
    at_s = round(slow.at_s + rng.random() * slow.lasts_s / 2, 3)
    return replace(
        scenario,
        workers=max(2, scenario.workers),
        servers=max(2, scenario.servers),
        quorum=1,
        tables="",
        lease_s=4.0,
        snapshot_s=0.3,
        keeps_log=False,
        joins_s=(),
        leaves=(),
        faults=(slow, Fault("kill server", at_s, 0.1, server=1, detail=0.7, on="ECHOED")),
    )


def _with_deaths_of_all(scenario: Scenario) -> Scenario:
    """Lead and workers die as a merge is answered: what was decided has to be in the log."""
    rng = random.Random(f"deaths of all {scenario.seed}")
    if rng.random() > DEATHS_OF_ALL:
        return scenario
    at_s, detail = round(rng.random(), 3), round(rng.random(), 3)
    death = Fault("kill lead", at_s, 0.1, detail=detail, on="UPDATED")
    return replace(
        scenario,
        servers=max(2, scenario.servers),
        chunks=max(2, scenario.chunks),
        latency_s=(0.0005, 0.002),
        snapshot_s=1.0,
        keeps_log=True,
        faults=(death, death._replace(kind="kill workers")),
    )


def _asking(scenario: Scenario) -> Scenario:
    rng, other = random.Random(f"asks {scenario.seed}"), scenario.companion
    tiers = ("", *DURABILITY_TIERS[scenario.durability])
    asks = rng.choice(tiers) if scenario.rule != "elastic" else ""
    return replace(scenario, asks=asks, companion=None if other is None else _asking(other))


def _with_later_runs(scenario: Scenario) -> Scenario:
    """The job is begun again: by another run, with other servers, or with another world size."""
    rng, other = random.Random(f"later runs {scenario.seed}"), scenario.companion
    is_alone = scenario.rule == "elastic" or any(one.kind == "cut all" for one in scenario.faults)
    if rng.random() > LATER_RUNS or is_alone or (other is not None and other.is_second_model):
        return scenario
    killed_s = round(rng.uniform(0.3, 2.0), 3) if rng.random() < 0.4 else None
    scenario = replace(scenario, killed_s=killed_s)
    runs = tuple(_draw_run(rng, scenario) for _ in range(rng.choice((1, 2, 2))))
    return replace(
        scenario,
        joins_s=(),
        leaves=(),
        steps=rng.randint(1, 4),
        shares=min(scenario.shares, scenario.workers),
        later=runs,
        faults=tuple(one._replace(at_s=round(one.at_s * rng.choice((1.0, 1.0, 2.0)), 3)) for one in scenario.faults),
    )


def _draw_run(rng: random.Random, scenario: Scenario) -> Run:
    servers = list(scenario.run.servers)
    if rng.random() < 0.5:
        rng.shuffle(servers)
        if not scenario.tables:  # they have a part for each shard
            servers = servers[: rng.randint(1, len(servers))]
    return Run(
        workers=rng.randint(1, scenario.workers if scenario.tables else 4),
        servers=tuple(servers),
        name=rng.choice(("run", "other", "other", "third", "third", "")),
        continues=rng.random() < 0.6,
        killed_s=round(rng.uniform(0.3, 2.0), 3) if rng.random() < 0.2 else None,
        rests_s=rng.choice((0.1, 0.1, 1.0, 2 * scenario.lease_s)),
    )


def _with_stranger(scenario: Scenario) -> Scenario:
    """Somebody without the job's key, in every fourth seed."""
    rng = random.Random(f"stranger {scenario.seed}")
    is_judged_alone = any(one.kind in ("cut all", "cut off") for one in scenario.faults)
    if rng.random() > STRANGERS or is_judged_alone:
        return scenario
    fault = Fault("stranger", round(FAULTY_S * rng.random(), 3), round(3.0 * rng.random(), 3), detail=rng.random())
    return replace(scenario, faults=tuple(sorted([*scenario.faults, fault], key=lambda one: one.at_s)))


def _with_companion(scenario: Scenario) -> Scenario:
    rng = random.Random(f"companion {scenario.seed}")
    if rng.random() > COMPANIONS:
        return scenario
    is_second_model = rng.random() < 0.5 and scenario.rule != "elastic"
    alike = ("servers", "shards", "latency_s", "lease_s", "tick_s", "snapshot_s", "keeps_log")
    alike += ("has_followers", "election", "elector_s")
    companion = replace(
        _draw_job(scenario.seed + OTHER_SEEDS),
        **{name: getattr(scenario, name) for name in alike},
        workers=scenario.workers if is_second_model else rng.choice((1, 2)),
        joins_s=scenario.joins_s if is_second_model else (),
        leaves=scenario.leaves if is_second_model else (),
        chunks=rng.choice((1, 2)),
        codec="",
        lead=0 if is_second_model else rng.randrange(scenario.servers),
        is_second_model=is_second_model,
        faults=(),
    )
    faults = [
        one._replace(rank=scenario.ranks + rng.randrange(companion.ranks))
        if not is_second_model and one.kind in OF_WORKERS and rng.random() < 0.3
        else one
        for one in scenario.faults
    ]
    return replace(scenario, companion=companion, faults=tuple(faults))


def _with_followers(scenario: Scenario) -> Scenario:
    rng, around = random.Random(f"followers {scenario.seed}"), random.Random(f"around followers {scenario.seed}")
    scenario = replace(
        scenario,
        has_followers=True,
        election=rng.choice(("etcd", "launcher")),
        elector_s=rng.choice((0.005, 0.1, 0.6)),
        follower_bytes=around.choice((None,) * 5 + (64, 4096)),
        apart_s=around.choice((-30.0, 0.0, 0.0, 30.0)),
        snapshot_s=scenario.snapshot_s if scenario.keeps_log else None,
    )
    others = [one for one in scenario.faults if one.kind != "bits flip" and rng.random() < 0.4]
    others = [one for one in others if scenario.keeps_log or one.kind not in OF_DISKS]
    count = rng.choice((0, 1, 1, 2, 2, 3, 4))
    mine = [_draw_follower_fault(rng, scenario) for _ in range(count)]
    if rng.random() < 0.4:  # much is on its way to the follower when something happens to the leader
        lasts_s = rng.uniform(0.5, min(4.0, 2 * scenario.lease_s))
        slow = _draw_follower_fault(rng, scenario)._replace(kind="slow servers", lasts_s=round(lasts_s, 3), on="")
        kind, later_s = rng.choice(("kill leader", "kill leader", "stop leader", "cut servers")), rng.random() * lasts_s
        mine += [slow, slow._replace(kind=kind, at_s=round(slow.at_s + later_s, 3))]
    if scenario.rule in ("apply", "merge") and around.random() < ANSWERS:
        # All that fails: the leader dies as an answer comes, while records are on a slow way. Nothing else is slow.
        lasts_s, at_s = around.uniform(0.5, 1.2) * scenario.lease_s, round(around.uniform(0.3, 2.0), 3)
        slow = Fault("slow servers", at_s, round(lasts_s, 3), server=around.randrange(scenario.servers))
        at_s, detail = round(at_s + around.random() * lasts_s / 2, 3), round(around.random(), 3)
        death = Fault("kill leader", at_s, 2 * scenario.lease_s, 0, slow.server, detail, "UPDATED")
        others, mine = [], [slow, death]
        scenario = replace(scenario, think_s=0.05, latency_s=(0.0005, 0.002), elector_s=0.005)
    alone = random.Random(f"alone {scenario.seed}")
    if alone.random() < LONE_LEADERS:
        at_s, lasts_s = round(alone.uniform(0.2, 1.5), 3), round(alone.uniform(2, 4) * scenario.lease_s, 3)
        server, detail = alone.randrange(scenario.servers), round(0.7 * alone.random(), 3)
        cut = Fault("cut servers", at_s, lasts_s, 0, server, detail, alone.choice(("PUSH", "VIEW", "COMMIT")))
        others, mine = [], [cut, cut._replace(kind="cut elector")]
    return replace(scenario, faults=tuple(sorted([*others, *mine], key=lambda fault: fault.at_s)))


def _draw_follower_fault(rng: random.Random, scenario: Scenario) -> Fault:
    fault = (_draw_elastic_fault if scenario.rule == "elastic" else _draw_fault)(rng, scenario)
    kind = rng.choices(list(FOLLOWER_KINDS), [weight for weight, _, _ in FOLLOWER_KINDS.values()])[0]
    _, shortest_s, longest_s = FOLLOWER_KINDS[kind]
    lasts_s = round(shortest_s + (longest_s - shortest_s) * rng.random() ** 2, 3)
    moment = rng.choice(FOLLOWER_MOMENTS) if rng.random() < 0.5 else ""
    return fault._replace(kind=kind, lasts_s=lasts_s, on=moment)


def _draw_job(seed: int) -> Scenario:
    rng = random.Random(f"scenario {seed}")
    rule = rng.choice(("apply", "average", "average", "merge"))
    lease_s = rng.choice((1.0, 2.0, 2.0, 4.0))
    workers = rng.choice((1, 2, 2, 3, 3, 4))
    steps = rng.randint(3, 8)
    tier = rng.choice(("memory", "snapshot", "log", "log"))
    scenario = Scenario(
        seed=seed,
        rule=rule,
        workers=workers,
        joins_s=tuple(round(rng.uniform(0.2, 2.0), 3) for _ in range(rng.choice((0, 0, 0, 1, 1, 2)))),
        leaves=((rng.randrange(workers), rng.randint(1, steps)),) if rng.random() < 0.3 else (),
        servers=rng.choice((1, 1, 2, 2, 3)),
        shards=rng.choice((1, 2, 2, 3)) if rng.random() < 0.7 else 1,
        chunks=rng.choice((1, 2, 3, 5)),
        steps=steps,
        think_s=rng.choice((0.05, 0.4, 1.0)),
        latency_s=rng.choice(((0.0005, 0.002), (0.001, 0.05), (0.01, lease_s / 12))),
        lease_s=lease_s,
        tick_s=rng.choice((0.1, 0.1, 0.2)),
        snapshot_s=None if tier == "memory" else rng.choice((0.3, 1.0, 8.0)),
        keeps_log=tier == "log",
    )
    scenario = replace(scenario, **_RULES[rule](rng))
    if rule == "average" and scenario.joins_s:
        scenario = replace(scenario, steps=2 * steps + 4)  # else it is over before somebody has joined
    if rng.random() < 0.4 and not (scenario.compensation or scenario.weighs):
        scenario = replace(scenario, codec=rng.choice(CODECS[rule]), joins_s=scenario.joins_s[: 4 - workers])
    elif rng.random() < 0.5:
        scenario = replace(scenario, shares=rng.choice((scenario.ranks, scenario.ranks, 1)))
    if rule == "average" and scenario.codec:
        scenario = _with_residuals(scenario)
    scenario = replace(scenario, has_reader=random.Random(f"reader {seed}").random() < READERS)
    scenario = _with_tables(scenario)
    count = rng.choice((0, 1, 1, 2, 2, 3, 4, 6))
    faults = sorted((_draw_fault(rng, scenario) for _ in range(count)), key=lambda fault: fault.at_s)
    if scenario.servers > 1 and rng.random() < 0.1:
        faults = [_draw_long_cut(rng, scenario)]
    return replace(scenario, faults=tuple(faults))


def _with_residuals(scenario: Scenario) -> Scenario:
    rng = random.Random(f"residuals {scenario.seed}")
    if rng.random() < 0.5:
        return scenario
    codec = rng.choice((scenario.codec, *LOSSY_OF_AVERAGES))
    return replace(scenario, leaves_residuals=True, codec=codec, weighs=rng.random() < 0.4)


def _with_tables(scenario: Scenario) -> Scenario:
    rng = random.Random(f"tables {scenario.seed}")
    if scenario.rule == "average" or rng.random() > TABLES:
        return scenario
    return replace(
        scenario,
        tables=rng.choice(("sgd", "sgd", "adagrad", "rowwise_adagrad")),
        evicts=rng.random() < 0.7,
        quorum=MAX_WORKERS,
        **dict.fromkeys(("grace", "compensation"), 0.0),
        codec="",
        scales=False,
        # Snapshots of what has changed come once there are rows.
        steps=2 * scenario.steps,
        snapshot_s=None if scenario.snapshot_s is None else 0.3,
    )


def _draw_elastic(seed: int) -> Scenario:
    rng = random.Random(f"elastic scenario {seed}")
    lease_s = rng.choice((1.0, 2.0, 2.0, 4.0))
    workers = rng.choice((1, 2, 2, 3, 3, 4))
    tier = rng.choice(("memory", "memory", "snapshot", "log"))
    scenario = Scenario(
        seed=seed,
        rule="elastic",
        workers=workers,
        joins_s=tuple(round(rng.uniform(0.2, 3.0), 3) for _ in range(rng.choice((0, 0, 1, 1, 2)))),
        steps=rng.randint(2, 8),
        shares=rng.choice((0, 0, 2, 5)),
        think_s=rng.choice((0.02, 0.1, 0.3)),
        latency_s=rng.choice(((0.0005, 0.002), (0.001, 0.05), (0.01, lease_s / 12))),
        lease_s=lease_s,
        tick_s=rng.choice((0.05, 0.1)),
        snapshot_s=None if tier == "memory" else rng.choice((0.3, 1.0)),
        keeps_log=tier == "log",
        virtual_workers=rng.choice((1, 2, 3, 3, 4, 5, 6)),
        checkpoint_steps=rng.choice((0, 1, 1, 2, 3)),
        shares_checkpoints=rng.random() < 0.5,
    )
    count = rng.choice((0, 1, 1, 2, 2, 3, 4, 6))
    faults = sorted((_draw_elastic_fault(rng, scenario) for _ in range(count)), key=lambda fault: fault.at_s)
    if (meets := random.Random(f"meetings {seed}")).random() < MEETINGS:
        at_s, lasts_s = meets.choice((0.0, *scenario.joins_s)), round(meets.uniform(0.1, 0.5), 3)
        faults.append(Fault("kill lead", at_s, lasts_s, detail=round(meets.random(), 3), on="MEET"))
    if (flips := random.Random(f"flips {seed}")).random() < DAMAGE and scenario.checkpoint_steps:
        at_s, lasts_s = round(flips.uniform(0.3, 2.0), 3), round(flips.uniform(0.1, 1.0), 3)
        faults.append(Fault("bits of a checkpoint flip", at_s, lasts_s, flips.randrange(workers)))
    scenario = replace(scenario, faults=tuple(faults))
    return _with_first_newcomer(scenario) if random.Random(f"newcomer {seed}").random() < NEWCOMERS else scenario


def _with_first_newcomer(scenario: Scenario) -> Scenario:
    """Nothing fails but the server, which begins with nothing, and a newcomer may be there before the members."""
    rng = random.Random(f"first newcomer {scenario.seed}")
    death = Fault("kill lead", round(rng.uniform(1.5, 4.0), 3), round(rng.uniform(0.1, 0.6), 3))
    return replace(
        scenario,
        workers=1,
        joins_s=(0.5, round(death.at_s + death.lasts_s + rng.uniform(-0.3, 0.2), 3)),
        steps=8,
        think_s=0.3,
        snapshot_s=None,
        keeps_log=False,
        virtual_workers=rng.choice((3, 4)),
        checkpoint_steps=1,
        shares_checkpoints=True,
        faults=(death,),
    )


def _draw_elastic_fault(rng: random.Random, scenario: Scenario) -> Fault:
    kind = rng.choices(list(ELASTIC_KINDS), [weight for weight, _, _ in ELASTIC_KINDS.values()])[0]
    _, shortest_s, longest_s = ELASTIC_KINDS[kind]
    batches = scenario.virtual_workers / scenario.workers + 2
    lasts_s = 0.5 + scenario.steps * (0.6 * batches * scenario.think_s + 8 * scenario.latency_s[1])
    return Fault(
        kind,
        round(rng.random() * min(FAULTY_S, lasts_s), 3),
        round(shortest_s + (longest_s - shortest_s) * rng.random() ** 2, 3),
        rng.randrange(scenario.ranks),
        0,
        round(rng.random(), 3),
        rng.choice(ELASTIC_MOMENTS) if rng.random() < 0.6 else "",
    )


_RULES = {
    "average": lambda rng: {"weighs": rng.random() < 0.3, "has_buffers": rng.random() < 0.4},
    "merge": lambda rng: {"quorum": rng.choice((1, 2, 2, 3)), "grace": rng.choice((0.0, 0.25, 0.25, 1.0, 4.0))},
    "apply": lambda rng: {
        "max_staleness": rng.choice((None, 0, 1, 3)),
        "optimizer": rng.choice(("SGD", "momentum", "Adam")),
        "compensation": rng.choice((0.0, 0.0, 0.5)),
        "scales": rng.random() < 0.2,
    },
}


def _draw_long_cut(rng: random.Random, scenario: Scenario) -> Fault:
    """All that fails: a worker cannot reach a server that does not lead, for longer than others may wait for it."""
    lasts_s = (5 + scenario.grace) * scenario.lease_s + 5 + 3 * scenario.think_s + 40 * scenario.latency_s[1]
    rank, server = rng.randrange(scenario.workers), rng.randrange(1, scenario.servers)
    return Fault("cut off", round(0.4 + rng.random(), 3), round(lasts_s, 3), rank, server, round(rng.random(), 3))


def _draw_fault(rng: random.Random, scenario: Scenario) -> Fault:
    kinds = {kind: one for kind, one in KINDS.items() if scenario.snapshot_s is not None or kind not in OF_DISKS}
    kind = rng.choices(list(kinds), [weight for weight, _, _ in kinds.values()])[0]
    _, shortest_s, longest_s = KINDS[kind] if kind != "cut off" else (bound * scenario.lease_s for bound in KINDS[kind])
    server = rng.randrange(scenario.servers)
    lasts_s = 0.8 + scenario.steps * (0.6 * scenario.think_s + 2 * scenario.latency_s[1])  # about so long it trains
    return Fault(
        kind,
        round(rng.random() * min(FAULTY_S, lasts_s), 3),
        round(shortest_s + (longest_s - shortest_s) * rng.random() ** 2, 3),
        rng.randrange(scenario.ranks),
        scenario.servers - 1 if kind == "cut off" and rng.random() < 0.5 else server,
        round(rng.random(), 3),
        rng.choice(CRITICAL if rng.random() < 0.5 else MOMENTS) if rng.random() < 0.5 else "",
    )
