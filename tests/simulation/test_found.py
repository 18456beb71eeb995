"""What the simulator has found, as the few faults that it takes."""

from __future__ import annotations

import logging

import pytest

from simulation.job import run
from simulation.planted import PLANTED, planted
from simulation.scenario import Fault, Scenario

FOUND = {
    # Worker 1 is stopped, another process gets its rank and ends its training; then the first one goes on. It heard
    # that its push had counted, by the numbers of the other.
    "a process that was replaced may come back": Scenario(
        seed=2457,
        max_staleness=0,
        workers=3,
        chunks=1,
        steps=5,
        think_s=1.0,
        faults=(Fault("zombie", 2.568, 5.162, 1, 0, 0.746),),
    ),
    # After a restart of the server a message of a worker's recovery is lost, and its lease runs out meanwhile. It did
    # not listen to what the server said to that.
    "a recovery does not hear that it was in vain": Scenario(
        seed=187,
        rule="average",
        workers=3,
        chunks=1,
        steps=6,
        think_s=0.05,
        latency_s=(0.01, 0.08333333333333333),
        lease_s=1.0,
        heartbeat_s=0.25,
        faults=(Fault("kill server", 1.735, 0.1, 2, 0, 0.482), Fault("noise", 1.829, 1.109, 0, 0, 0.9)),
    ),
    # With a quorum of one, worker 0 ends an exchange alone and is killed. Its next process joins with the state before
    # that exchange and pushes to it: the server took the first process's contribution for its own.
    "a process counts for its predecessor": Scenario(
        seed=422,
        rule="average",
        quorum=1,
        chunks=1,
        steps=2,
        think_s=1.0,
        latency_s=(0.001, 0.05),
        faults=(
            Fault("clog", 0.34, 3.756, 1, 0, 0.313),
            Fault("stop worker", 2.735, 2.252, 1, 0, 0.038),
            Fault("kill worker", 2.771, 0.143, 0, 0, 0.03),
        ),
    ),
    # A worker abstains while the other waits, so a merge waits for nobody any more. The server made the answer to the
    # one that abstains, then merged, which wrote over the weights that this answer was about to bring.
    "who abstains gets newer weights than their version": Scenario(
        seed=57, rule="merge", quorum=3, grace=0.25, steps=6, latency_s=(0.01, 0.16666666666666666)
    ),
    # Worker 1 abstains, so worker 0 is merged alone. The snapshot that the log goes on from did not say who had
    # abstained: the recovery merged worker 0 together with worker 1's next push, and had other weights than before.
    "a recovery waits for workers that abstained": Scenario(
        seed=159,
        rule="merge",
        codec="fp16",
        quorum=3,
        grace=0.25,
        steps=6,
        think_s=0.05,
        latency_s=(0.0005, 0.002),
        tick_s=0.2,
        snapshot_s=0.3,
        keeps_log=True,
        faults=(Fault("kill server", 1.915, 0.115, 0, 0, 0.147),),
    ),
}
FOUND["a job without live workers gets its chunks from worker 0"] = Scenario(
    # Worker 2 is the last, and its server restarts. It awaits the others for a lease at one shard after the other; its
    # own lease runs out, and then the first shard wanted its chunks from worker 0, which has left.
    seed=1135,
    rule="average",
    workers=3,
    servers=2,
    shards=2,
    chunks=1,
    steps=5,
    think_s=0.05,
    latency_s=(0.001, 0.05),
    tick_s=0.2,
    faults=(Fault("kill server", 2.678, 0.22, 0, 0, 0.274),),
)
FOUND["a JOIN that was given up is answered, and not the one that counts"] = Scenario(
    # Worker 0's JOIN is refused at one server, and so made anew at both. The other took the first one for the later,
    # answered that, and had worker 1 give its state again, which waited for worker 0 at the first.
    seed=13,
    rule="average",
    quorum=2,
    servers=2,
    think_s=1.0,
    latency_s=(0.01, 0.08333333333333333),
    lease_s=1.0,
    heartbeat_s=0.25,
    tick_s=0.2,
    faults=(Fault("kill worker", 2.737, 0.649, 0, 1, 0.37), Fault("kill server", 3.847, 1.086, 0, 1, 0.717)),
)
FOUND["an average without its contributors is taken under a quorum"] = Scenario(
    # An exchange ended without worker 2; the server restarts, and another worker brings the average. Nobody knew who
    # was in it, and worker 2 was told that it was.
    seed=7,
    rule="average",
    quorum=1,
    workers=3,
    chunks=1,
    steps=3,
    latency_s=(0.01, 0.08333333333333333),
    lease_s=1.0,
    heartbeat_s=0.25,
    faults=(Fault("kill server", 1.795, 0.226, 0, 0, 0.072),),
)
FOUND["a shard that was sealed before worker 0 died takes no values"] = Scenario(
    # Worker 0 is killed between the SEALs of two servers. Its next process has to give the values to both, and one
    # took none any more.
    seed=24,
    rule="average",
    servers=2,
    steps=3,
    latency_s=(0.01, 0.3),
    faults=(Fault("kill worker", 2.081, 0.5, 0, 0, 0.2),),
)
FOUND["a recovery does not hear of one more restart"] = Scenario(
    # Worker 1 recovers after a restart of the server, which restarts once more before it has answered. That life's
    # refusals were taken for those of an old one.
    seed=496,
    max_staleness=1,
    chunks=1,
    steps=2,
    think_s=0.05,
    latency_s=(0.01, 0.16666666666666666),
    snapshot_s=1.0,
    keeps_log=True,
    faults=(Fault("kill server", 1.508, 1.532, 0, 0, 0.636), Fault("kill server", 3.748, 0.356, 0, 0, 0.143)),
)
FOUND["a worker catches up on averages that nobody has"] = Scenario(
    # Worker 1 has contributed to exchange 3 and is cut off from its answer. The others end exchange 4, which lets the
    # server forget 3, and leave. The server let worker 1 go on after 3, whose average it asked for without end.
    seed=2636,
    rule="average",
    codec="topk:ratio=0.02",
    workers=3,
    servers=2,
    shards=2,
    chunks=1,
    steps=4,
    think_s=1.0,
    latency_s=(0.0005, 0.002),
    snapshot_s=1.0,
    keeps_log=True,
    faults=(
        Fault("break", 1.658, 0.935, 1, 0, 0.324),
        Fault("cut", 2.016, 3.272, 1, 1, 0.636),
        Fault("clog", 2.995, 2.398, 1, 0, 0.218),
    ),
)
FOUND["merges of several chunks wait for each other"] = Scenario(
    # Two servers merge in different orders, and each of two workers waits for a merge that only the other can complete.
    seed=20358,
    rule="merge",
    quorum=2,
    grace=0.25,
    workers=3,
    servers=2,
    steps=3,
    latency_s=(0.0005, 0.002),
    lease_s=4.0,
    heartbeat_s=1.0,
    tick_s=0.2,
    snapshot_s=1.0,
    keeps_log=True,
    faults=(Fault("kill server", 1.707, 0.318, 2, 0, 0.144),),
)
FOUND["updates count for the server that a worker greeted first"] = Scenario(
    # Worker 1 waits for the job's first values while the server restarts, and the next life lets it in. It loses its
    # lease, comes back, and reports the updates that this life had acknowledged as those of the life before. The server
    # took itself for one with an older state, and refused the job from then on.
    seed=16398,
    rule="merge",
    quorum=1,
    grace=1.0,
    workers=4,
    chunks=1,
    steps=7,
    shares=1,
    latency_s=(0.0005, 0.002),
    lease_s=1.0,
    heartbeat_s=0.25,
    tick_s=0.2,
    snapshot_s=1.0,
    keeps_log=True,
    faults=(Fault("fsync fails", 0.439, 0.498, 3, 0, 0.052), Fault("stop worker", 3.917, 3.393, 1, 0, 0.791)),
)
FOUND["who goes with others is merged for want of them"] = Scenario(
    # Nothing arrives from either worker, and both leases run out at once. Worker 1's push was here: the server let
    # worker 0 go first, then waited for nobody any more, and merged the push of a worker that was gone, too.
    seed=5749,
    rule="merge",
    codec="fp4",
    quorum=3,
    grace=0.25,
    chunks=1,
    steps=2,
    latency_s=(0.0005, 0.002),
    lease_s=1.0,
    heartbeat_s=0.25,
    snapshot_s=1.0,
    faults=(Fault("cut", 0.888, 2.206, 0, 0, 0.93),),
)
FOUND["a job that begins anew waits for worker 0 where another has its state"] = Scenario(
    # Worker 2 is stopped, worker 1 dies, worker 0 ends its training. A new process of worker 1 begins the job anew and
    # is told to wait for worker 0; so was worker 2, which came back with its state.
    seed=7141,
    rule="average",
    quorum=2,
    workers=3,
    chunks=1,
    steps=5,
    lease_s=1.0,
    heartbeat_s=0.25,
    snapshot_s=0.3,
    keeps_log=True,
    faults=(
        Fault("stop worker", 1.321, 3.585, 2, 0, 0.96),
        Fault("disk full", 1.325, 2.059, 2, 0, 0.073),
        Fault("kill worker", 2.323, 1.324, 1, 0, 0.85),
    ),
)
FOUND["a worker that returns with state is taken for one without, because a new one had its rank"] = Scenario(
    # Worker 1 is stopped, and a new process wants its rank; the server restarts. It has never heard of the first one,
    # which comes back once the new one is gone, has the only state, and was told to wait for somebody with state.
    seed=5887,
    rule="average",
    chunks=1,
    steps=5,
    faults=(Fault("zombie", 1.853, 1.184, 1, 0, 0.521), Fault("kill server", 2.946, 1.54, 1, 0, 0.262)),
)
FOUND["a process of a former life counts for one that has ended"] = Scenario(
    # The server loses the job, worker 0 is stopped, another process gets its rank, gives the job its values again, and
    # ends its training. Then the first one goes on, which this life of the server has never met: its push had the
    # number of one of the other process, and was taken for a repeat of that.
    seed=59716,
    max_staleness=0,
    workers=1,
    chunks=1,
    steps=5,
    shares=1,
    think_s=0.05,
    latency_s=(0.0005, 0.002),
    faults=(Fault("kill server", 0.662, 0.584, 0, 0, 0.343), Fault("zombie", 1.073, 2.063, 0, 0, 0.184)),
)
FOUND["a worker is asked for an average that a later one has overwritten"] = Scenario(
    # Worker 1 was put out, and takes part again after a restart of the server with the state that it had. Worker 2 said
    # that it had the average which worker 1 lacks, has had a later one since, and was asked for it for ever.
    seed=393,
    rule="average",
    workers=3,
    chunks=3,
    steps=5,
    lease_s=1.0,
    heartbeat_s=0.25,
    snapshot_s=0.3,
    keeps_log=True,
    faults=(
        Fault("clog", 1.235, 2.311, 1, 0, 0.569),
        Fault("stop worker", 1.302, 1.268, 1, 0, 0.733),
        Fault("cut", 2.42, 1.735, 2, 0, 0.278),
        Fault("fsync fails", 3.665, 1.699, 0, 0, 0.012),
    ),
)
FOUND["a worker that has to rejoin deposits its state for another"] = Scenario(
    # One shard has no chunks, and does not know that exchanges have ended: it took worker 1 for one with state, though
    # it has to join, and had it give worker 0 its state. That overwrote what worker 2 had deposited.
    seed=9,
    rule="average",
    quorum=2,
    workers=3,
    shards=2,
    chunks=1,
    steps=3,
    think_s=1.0,
    latency_s=(0.01, 0.16666666666666666),
    snapshot_s=0.3,
    faults=(
        Fault("stop worker", 1.175, 3.852, 1, 0, 0.134),
        Fault("stop server", 1.825, 0.992, 1, 0, 0.435),
        Fault("kill worker", 2.624, 2.061, 0, 0, 0.642),
    ),
)
FOUND["a worker is let in by an ADMIT for a JOIN that it has given up"] = Scenario(
    # Worker 0 joins, and its donor is out for a moment: its JOIN is refused, and made anew. An ADMIT for the first one
    # let it in at one shard. The donor waited for it there, and it waited for the donor at the other.
    seed=15,
    rule="average",
    codec="fp16",
    servers=2,
    steps=4,
    latency_s=(0.001, 0.05),
    lease_s=1.0,
    heartbeat_s=0.25,
    faults=(Fault("kill worker", 1.124, 1.203, 0, 1, 0.468), Fault("stop worker", 2.453, 1.24, 1, 0, 0.456)),
)
FOUND["a JOIN goes on after a recovery, where other shards have answered it"] = Scenario(
    # Worker 2 joins, and nothing arrives between it and one server, which puts it out. It said HELLO again and sent its
    # JOIN there alone: the donor waited for it at the other server, and it waited for the donor here.
    seed=6,
    rule="average",
    workers=3,
    servers=2,
    chunks=3,
    steps=4,
    latency_s=(0.0005, 0.002),
    tick_s=0.2,
    faults=(Fault("kill server", 0.716, 0.363, 0, 0, 0.387), Fault("clog", 2.944, 3.967, 2, 0, 0.339)),
)
FOUND["chunks that disagree about who is ahead wait for each other"] = Scenario(
    # A server goes back to a snapshot that has a step of worker 0 and none of worker 1: there worker 0 is ahead, and in
    # the other server's chunk worker 1 is. Each was held until the other had taken its next step.
    seed=66422,
    max_staleness=0,
    servers=2,
    chunks=2,
    steps=3,
    think_s=0.05,
    latency_s=(0.001, 0.05),
    lease_s=4.0,
    heartbeat_s=1.0,
    snapshot_s=0.3,
    faults=(Fault("kill server", 1.271, 1.616, 1, 0, 0.68),),
)
FOUND["a grace window waits for workers that bring nothing"] = Scenario(
    # A worker was expected within the window, and then abstained. The merge waited for it until the window's end, where
    # another worker might still have come.
    seed=559,
    rule="merge",
    quorum=1,
    grace=4.0,
    workers=4,
    servers=2,
    chunks=3,
    steps=8,
    think_s=1.0,
    latency_s=(0.0005, 0.002),
    lease_s=4.0,
    heartbeat_s=1.0,
    tick_s=0.2,
    snapshot_s=None,
    faults=(Fault("stop worker", 0.537, 3.372, 1, 1, 0.404),),
)
FOUND["a job without state waits for worker 0, which has ended, and not for one with averages"] = Scenario(
    # Worker 1 waits for somebody's state, worker 2 is stopped in its last step, and the server loses the job. Workers 0
    # and 3 give it values and end. Worker 2, put out, says HELLO and names the averages that it has, but no members, so
    # it was taken for one without state. It ended, and worker 1 waited for worker 0.
    seed=176610,
    rule="average",
    workers=4,
    chunks=1,
    steps=6,
    think_s=0.05,
    latency_s=(0.0005, 0.002),
    lease_s=2.0,
    heartbeat_s=0.5,
    tick_s=0.1,
    snapshot_s=None,
    faults=(
        Fault("clog", 0.333, 3.335, 1, 0, 0.538),
        Fault("stop worker", 2.687, 4.85, 2, 0, 0.428),
        Fault("kill server", 3.892, 0.534, 2, 0, 0.735),
    ),
)
FOUND["a worker that has just been answered counts as stuck"] = Scenario(
    # Worker 0 said that it waits, with no exchange of this shard open, as its last answer arrived. Until its next
    # heartbeat the shard's merges had the quorum of the other two, though worker 0 was computing its next difference.
    seed=623,
    rule="merge",
    quorum=3,
    grace=0.25,
    workers=3,
    servers=2,
    chunks=2,
    steps=8,
    shares=3,
    think_s=0.4,
    latency_s=(0.01, 0.08333333333333333),
    lease_s=1.0,
    heartbeat_s=0.25,
    tick_s=0.1,
    snapshot_s=None,
)
FOUND["a state is deposited while another joiner reads one"] = Scenario(
    # Two workers join at once, and one of them asks twice. Worker 0 had its second request left when the other was let
    # in, and deposited a later state while that one, which nobody waited for, read the earlier one.
    seed=4,
    rule="average",
    quorum=2,
    workers=4,
    shards=2,
    chunks=3,
    steps=5,
    shares=4,
    latency_s=(0.01, 0.3333333333333333),
    lease_s=4.0,
    heartbeat_s=1.0,
    tick_s=0.2,
    snapshot_s=0.3,
    faults=(
        Fault("kill worker", 1.962, 0.416, 1, 0, 0.502),
        Fault("break", 1.975, 0.728, 0, 0, 0.257),
        Fault("stop server", 2.009, 0.132, 3, 0, 0.25),
        Fault("kill server", 3.25, 0.957, 0, 0, 0.873),
    ),
)
FOUND["a worker that others name and that has to join is taken for a new one"] = Scenario(
    # Worker 1 was put out before the server restarted, and worker 0 names it still. It was taken for a new process, and
    # waited for worker 0 to begin the job anew, which had ended its training.
    seed=103,
    rule="average",
    quorum=1,
    weighs=True,
    workers=3,
    shards=2,
    steps=3,
    shares=3,
    think_s=1.0,
    latency_s=(0.001, 0.05),
    lease_s=4.0,
    heartbeat_s=1.0,
    snapshot_s=0.3,
    faults=(
        Fault("stop worker", 1.322, 3.395, 2, 0, 0.134),
        Fault("kill server", 2.012, 0.103, 0, 0, 0.526),
        Fault("kill server", 3.177, 0.259, 0, 0, 0.731),
    ),
)
# All workers lost their places, each at another time at each shard: worker 2 is let in by the lead alone, worker 0 by
# the other shard alone, and each waited for the other's state. The lead's word counts.
FOUND["two workers wait for each other's state, each let in by another shard"] = Scenario(
    seed=76570,
    rule="average",
    quorum=1,
    weighs=True,
    workers=3,
    servers=2,
    chunks=1,
    steps=1,
    shares=3,
    think_s=1.0,
    latency_s=(0.0005, 0.002),
    lease_s=4.0,
    heartbeat_s=1.0,
    snapshot_s=1.0,
    tick_s=0.2,
    faults=(
        Fault("stop worker", 0.827, 4.827, 2, 0, 0.259),
        Fault("kill worker", 1.31, 1.222, 0, 0, 0.191),
        Fault("kill worker", 3.064, 3.395, 1, 1, 0.861),
    ),
)
# A worker ends its training, and says so at all shards; another process of rank 0 begins the job anew at the lead. A
# shard still waited for a worker that somebody had named after a restart.
FOUND["a shard waits for workers of a job that begins anew"] = Scenario(
    seed=54764,
    rule="average",
    quorum=2,
    servers=2,
    shards=2,
    chunks=1,
    steps=1,
    room=2.0,
    think_s=0.05,
    latency_s=(0.001, 0.05),
    lease_s=2.0,
    tick_s=0.1,
    faults=(
        Fault("kill server", 0.943, 2.47, 0, 0, 0.151),
        Fault("zombie", 2.252, 1.406, 0, 0, 0.775),
        Fault("kill worker", 3.228, 4.883, 1, 1, 0.104),
    ),
)
# Worker 0 is stopped between two HELLOs; its next process gives the job its values, and dies. The first one goes on;
# a shard that has never heard of it takes values from it anew. The other has values, and no process could enter.
FOUND["an old process of worker 0 takes its values from one shard"] = Scenario(
    seed=92272,
    max_staleness=0,
    workers=1,
    shards=2,
    chunks=3,
    steps=1,
    think_s=0.4,
    latency_s=(0.01, 0.08333333333333333),
    lease_s=1.0,
    heartbeat_s=0.25,
    tick_s=0.1,
    snapshot_s=1.0,
    keeps_log=True,
    faults=(Fault("zombie", 0.28, 3.525, 0, 0, 0.453), Fault("kill worker", 2.452, 2.099, 0, 0, 0.031)),
)
# A worker says HELLO before the first exchange has ended at the lead, and after it has at another shard. It read the
# initial values from one, and what was deposited for another joiner from the other.
FOUND["a new worker reads what is deposited for another, as one shard lets it in"] = Scenario(
    seed=40713,
    rule="average",
    quorum=2,
    workers=3,
    servers=2,
    shards=2,
    chunks=3,
    steps=2,
    think_s=0.4,
    latency_s=(0.01, 0.08333333333333333),
    lease_s=1.0,
    heartbeat_s=0.25,
    snapshot_s=1.0,
    tick_s=0.2,
    faults=(
        Fault("stop server", 1.576, 4.291, 2, 1, 0.914),
        Fault("kill worker", 2.273, 3.327, 1, 0, 0.065),
        Fault("kill worker", 3.005, 3.664, 2, 0, 0.719),
        Fault("kill server", 3.104, 1.177, 2, 1, 0.149),
    ),
)
# Worker 2 lacks an average and waits for state; meanwhile the others end an exchange, then its lease runs out. It came
# back before anything else had happened, and went on from its own state.
FOUND["a joiner that is put out has missed nothing"] = Scenario(
    seed=99450,
    rule="average",
    codec="topk:ratio=0.02",
    quorum=2,
    workers=3,
    chunks=1,
    steps=3,
    think_s=0.4,
    latency_s=(0.001, 0.05),
    lease_s=1.0,
    heartbeat_s=0.25,
    tick_s=0.1,
    snapshot_s=1.0,
    keeps_log=True,
    faults=(
        Fault("kill worker", 0.628, 3.603, 0, 0, 0.222),
        Fault("clog", 1.059, 0.316, 2, 0, 0.159),
        Fault("kill server", 1.563, 0.68, 2, 0, 0.192),
        Fault("stop server", 2.884, 2.138, 0, 0, 0.731),
        Fault("kill server", 3.104, 0.202, 2, 0, 0.309),
        Fault("disk full", 3.88, 1.34, 0, 0, 0.099),
    ),
)
# Worker 0 ends its training and leaves. Worker 1, whose state the server has forgotten, waited for worker 0 to give
# values.
FOUND["a job without state waits for worker 0, which has ended, and not for one that had some"] = Scenario(
    seed=114127,
    rule="average",
    quorum=1,
    weighs=True,
    chunks=1,
    steps=4,
    shares=2,
    think_s=0.4,
    latency_s=(0.001, 0.05),
    lease_s=4.0,
    heartbeat_s=1.0,
    tick_s=0.2,
    faults=(Fault("kill server", 1.249, 2.78, 1, 0, 0.383), Fault("zombie", 3.817, 0.543, 1, 0, 0.368)),
)
# A donor lets a joiner in at both shards, by a request of before the lead restarted; the other shard does not know the
# joiner yet. The donor's step waited for it at the lead, and it waited for the other shard.
FOUND["a JOIN waits for a shard that knew nothing of the joiner when it was admitted"] = Scenario(
    seed=18102,
    rule="average",
    quorum=2,
    servers=2,
    chunks=1,
    steps=4,
    shares=2,
    think_s=0.05,
    latency_s=(0.001, 0.05),
    lease_s=1.0,
    heartbeat_s=0.25,
    tick_s=0.1,
    snapshot_s=0.3,
    faults=(
        Fault("zombie", 0.963, 4.029, 1, 1, 0.772),
        Fault("stop worker", 1.998, 4.376, 0, 1, 0.708),
        Fault("stop worker", 3.395, 0.921, 0, 0, 0.994),
        Fault("kill server", 3.406, 2.126, 0, 0, 0.83),
    ),
)
# Planted bugs that few seeds find.
FOUND["rarely: contributions of a worker that left stay"] = Scenario(
    seed=2439,
    rule="average",
    workers=4,
    chunks=1,
    steps=1,
    shares=1,
    latency_s=(0.01, 0.3333333333333333),
    lease_s=4.0,
    heartbeat_s=1.0,
    faults=(Fault("kill worker", 1.341, 0.192, 1, 0, 0.981), Fault("zombie", 1.356, 4.276, 0, 0, 0.996)),
)
FOUND["rarely: who came and who left is not logged"] = Scenario(
    seed=0,
    chunks=1,
    steps=2,
    think_s=0.05,
    latency_s=(0.01, 0.16),
    lease_s=1.0,
    heartbeat_s=0.25,
    snapshot_s=1.0,
    keeps_log=True,
    faults=(Fault("zombie", 1.421, 4.07, 1, 0, 0.782), Fault("kill server", 2.928, 0.2, 0, 0, 0.932)),
)
FOUND["rarely: a restart forgets which processes were replaced"] = Scenario(
    seed=375,
    chunks=1,
    steps=8,
    think_s=0.05,
    latency_s=(0.001, 0.05),
    lease_s=1.0,
    heartbeat_s=0.25,
    snapshot_s=0.3,
    keeps_log=True,
    faults=(Fault("zombie", 1.164, 3.328, 1, 0, 0.485), Fault("kill server", 3.036, 0.2, 0, 0, 0.693)),
)


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", FOUND)
def test_it_stays_mended(name):
    scenario = FOUND[name]
    assert run(scenario).violation == ""
    if name in PLANTED:
        with planted(name):
            assert run(scenario).violation
