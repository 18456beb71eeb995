"""Trainings under Ray on a cluster of two nodes, one after another; writes what came of each as JSON.

    python tests/support/ray_trainings.py OUT.json CASE ...

A program of its own: Ray's driver leaves threads and warnings behind, and its cluster ends with it.
"""

import json
import os
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
os.environ["RAY_DISABLE_IMPORT_WARNING"] = "1"

import ray
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from psengine.integrations.ray import PSEngineConfig

STEPS = 4
NODE = {"num_cpus": 2, "object_store_memory": 10**8}


def train(config):
    """Epochs of a small model; each worker leaves a file for each of its starts."""
    import os
    import signal
    import tempfile
    from pathlib import Path

    import ray.train
    import torch
    from ray.train import Checkpoint

    import psengine
    from psengine.integrations.ray import report

    torch.set_num_threads(1)
    folder = Path(config["folder"])
    context = psengine.init()
    ray_context = ray.train.get_context()
    worker = ray_context.get_world_rank()

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    first_epoch = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved) / "state.pt", weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    before = [round(p.double().sum().item(), 9) for p in net.parameters()]
    model = psengine.DistributedDataParallel(net)
    optimizer = psengine.DistributedOptimizer(optimizer, model)
    start = {
        "pid": os.getpid(),
        "epoch": first_epoch,
        "context": [
            context.rank,
            context.world_size,
            context.worker,
            context.workers,
            context.is_main_process,
        ],
        "before": before,
        "begun_with": [round(p.double().sum().item(), 9) for p in net.parameters()],
        "strategy": model.strategy.name,
    }
    starts = len(list(folder.glob(f"start-{worker}-*")))
    (folder / f"start-{worker}-{starts}").write_text(json.dumps(start))

    def is_first(what):
        try:
            (folder / what).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def servers():
        with psengine.connect(os.environ["PSENGINE_SERVERS"].split(","), role="reader") as client:
            (snapshot,) = client.session.administer({"action": "snapshot"})
            assert "Durable" in snapshot["text"], snapshot
            return client.status()

    for epoch in range(first_epoch, config["epochs"]):
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(1000 * epoch + 10 * step + worker)
            optimizer.zero_grad()
            loss = model(torch.randn(16, 8, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            time.sleep(config["pause_s"])
        if config["kill"] == "worker" and (worker, epoch) == (context.workers - 1, 1) and is_first("worker killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if config["kill"] == "error" and (worker, epoch) == (0, 1) and is_first("worker failed"):
            ray.train.get_all_reported_checkpoints()  # once Ray has the one of the epoch before
            raise ValueError("bad data")
        if config["kill"] == "server" and (worker, epoch) == (0, 2) and is_first("server killed"):
            (folder / "servers before").write_text(json.dumps(servers()))
            actors = ray.util.list_named_actors(all_namespaces=True)
            (server,) = [actor for actor in actors if actor["name"].startswith("psengine-server-")]
            ray.kill(ray.get_actor(server["name"], server["namespace"]), no_restart=False)
        with tempfile.TemporaryDirectory() as saved:
            checkpoint = None
            if worker == 0:
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, Path(saved) / "state.pt")
                checkpoint = Checkpoint.from_directory(saved)
            if config["reports_wrongly"]:
                ray.train.report({}, checkpoint=checkpoint)
            report({"epoch": epoch, "loss": loss.item()}, checkpoint)
    if config["kill"] == "server" and worker == 0:
        (folder / "servers after").write_text(json.dumps(servers()))
    weights = [p.detach().flatten().tolist() for p in net.parameters()]
    (folder / f"end-{worker}").write_text(json.dumps({"weights": weights}))
    return weights


def run(name, torch_config, folder, *, epochs=3, failures=2, **options):
    settings = {"kill": "", "pause_s": 0.0, "reports_wrongly": False, "epochs": epochs, **options}
    folder = Path(folder) / name
    folder.mkdir()
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), **settings},
        torch_config=torch_config,
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        run_config=RunConfig(
            name=name,
            storage_path=str(folder.parent / "storage"),
            failure_config=FailureConfig(max_failures=failures),
        ),
    )
    found = {"error": "", "metrics": None}
    try:
        result = trainer.fit()
        found |= {"metrics": result.metrics, "returned": result.return_value}
    except Exception:
        found["error"] = traceback.format_exc()
    for path in sorted(folder.iterdir()):
        if path.stat().st_size:
            found[path.name] = json.loads(path.read_text())
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    found["left"] = [str(path) for path in session.glob("psengine-*")]
    return found


def async_config(strategy="async", **options):
    return PSEngineConfig(strategy, server_options={"snapshot_interval_s": 0.2, "lease_s": 10.0}, **options)


def run_page():
    """The program of the documentation, as it stands there."""
    page = Path(__file__).parents[2] / "docs" / "launching" / "ray.md"
    (program,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    names = {"__name__": "__main__"}
    exec(compile(program, str(page), "exec"), names)
    return {"metrics": names["result"].metrics, "left": []}


CASES = {
    "sync": lambda at: run("sync", PSEngineConfig("sync"), at),
    "sync-server": lambda at: run("sync-server", PSEngineConfig("sync-server", servers=2), at),
    "sync-failed": lambda at: run("sync-failed", PSEngineConfig("sync"), at, kill="error"),
    "async-killed": lambda at: run("async-killed", async_config(), at, kill="worker", pause_s=0.25, epochs=6),
    "async-server-killed": lambda at: run(
        "async-server-killed", async_config(), at, kill="server", pause_s=0.25, epochs=6
    ),
    "reports-wrongly": lambda at: run("reports-wrongly", async_config(), at, reports_wrongly=True, failures=0),
    "page": lambda at: run_page(),
    "gives-up": lambda at: run("gives-up", async_config(), at, kill="worker", failures=0),
}


def main():
    out, *names = sys.argv[1:]
    found = {}
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        # The cluster's address is written there, whatever "temp_dir" is; a machine that never ran Ray does not have it.
        Path("/tmp/ray").mkdir(exist_ok=True)
        # The paths of Ray's sockets are near the limit of 107 bytes.
        cluster = Cluster(
            initialize_head=True,
            head_node_args={**NODE, "include_dashboard": False, "temp_dir": folder},
        )
        try:
            cluster.add_node(**NODE)
            ray.init(address=cluster.address, log_to_driver=True)
            for name in names or CASES:
                found[name] = CASES[name](folder)
        finally:
            ray.shutdown()
            cluster.shutdown()
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
