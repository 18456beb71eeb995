"""Values that were trained are not replaced by a run that names other servers than those that have them."""

from contextlib import ExitStack

import pytest
import torch
from support.server_process import running_server
from support.shard_world import APPLY, spec
from support.worker_sessions import crew

from psengine.cli.main import main
from psengine.errors import PSEngineError, ServerRefusedError

SPECS = [spec(0, 1000), spec(1, 1000)]


def values(worker):
    landings = [torch.empty(1000), torch.empty(1000)]
    for key, landing in enumerate(landings):
        worker.pull(key, [landing]).wait()
    return [float(landing[0]) for landing in landings]


@pytest.mark.parametrize(("restarts", "trained"), [(False, (0, 1)), (True, (0, 1)), (False, (0,))])
def test_a_run_that_names_other_servers_is_refused_by_name(tmp_path, restarts, trained):
    with ExitStack() as stack:

        def start(name, **options):
            directory = tmp_path / name
            return running_server(durability="log", snapshot_dir=directory, **options)

        running = {name: stack.enter_context(ExitStack()) for name in "abc"}
        servers = {name: running[name].enter_context(start(name)) for name in "abc"}
        at = {name: server.addresses[0] for name, server in servers.items()}
        with crew([at["a"], at["b"]], 1, SPECS, rule=APPLY) as (worker,):
            parameters = [torch.zeros(1), torch.zeros(1)]
            optimizer = torch.optim.SGD(parameters, lr=1.0)
            worker.attach_optimizer(SPECS, optimizer, dict(zip(("p0", "p1"), parameters, strict=True)))
            for key in trained:
                worker.push(key, torch.ones(1000), []).wait()
        if restarts:
            for name in "ab":
                running[name].close()
                running[name].enter_context(start(name, bind=at[name]))
        theirs = f"the values of job 'job' are with {at['a']}, {at['b']}; this worker names them"
        for names, words in {
            "ac": f"with {at['c']} among them, which has none",
            "ba": "in another order",
            "b": "1 server less",
            "a": "1 server less",
            "abc": "1 server more",
            "cab": "1 server more",
        }.items():
            if names == "b" and 1 not in trained:
                continue  # what it has is nobody's work
            with pytest.raises(PSEngineError) as caught, crew([at[name] for name in names], 1, SPECS, rule=APPLY):
                pass
            got = f"(got {', '.join(at[name] for name in names)})"
            assert f"{theirs} {words}. Fix: " in str(caught.value), names
            assert got in str(caught.value), names
        with crew([at["a"], at["b"]], 1, SPECS, rule=APPLY) as (worker,):
            assert values(worker) == [-1.0, -1.0 if 1 in trained else 0.0]


def test_a_job_that_was_dropped_at_one_of_its_servers_is_lost_by_name():
    with running_server() as first, running_server() as second:
        addresses = [first.addresses[0], second.addresses[0]]
        with crew(addresses, 1, SPECS, rule=APPLY):
            pass
        with pytest.raises(SystemExit):
            main(["admin", "forget", "--job", "job", "--server-address", addresses[1]])
        what = f"{addresses[1]} is without its weights \\(expected 1 chunks, got 0\\)"
        with pytest.raises(ServerRefusedError, match=what), crew(addresses, 1, SPECS, rule=APPLY):
            pass
