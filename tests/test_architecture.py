"""The lines between the layers, read off the imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import psengine
from psengine.installation import install_command

PACKAGE = Path(psengine.__file__).parent
MODULES = {str(p.relative_to(PACKAGE).with_suffix("")): p for p in sorted(PACKAGE.rglob("*.py"))}

# Lower may not import higher.
LAYERS = [
    {"errors", "messages", "installation", "native"},
    {"ops"},
    {
        "extras",
        "environment",
        "launchers",
        "rendezvous",
        "local_sockets",
        "slurm_lists",
        "buckets",
        "bucket_caps",
        "freed_memory",
        "backward_timer",
        "compilation",
        "outputs",
        "module_buffers",
        "module_state",
        "observers",
        "overview",
        "stall_inspector",
        "clocks",
        "timeline",
        "timeline_files",
        "timeline_spans",
    },
    {"collectives", "protocol"},
    {"shared_secret"},
    {"client", "server"},
    {"strategies", "sync_batch_norm", "metrics", "metric_leaves", "samplers", "batch_weights"},
    {
        "bucket_layout",
        "gradient_hooks",
        "reducer",
        "usage",
        "finite_check",
        "gradient_norms",
        "static_graph",
        "comm_hooks",
        "joining",
        "delayed_all_reduce",
        "distributed_autograd",
        "logging_data",
        "mixed_precision",
        "constructor_checks",
        "parallel",
    },
    {"optimizer"},
    {"comparison", "integrations"},
    {"__init__", "cli"},
]
MAY_USE_TORCH_DISTRIBUTED = {
    "cli/bench_worker",
    "cli/launching/elastic",
    "cli/launching/nodes",
    "cli/launching/torchrun_options",
    "cli/doctor_checks/collectives",
    "cli/doctor_checks/exchange_ranks",
    "collectives/c10d",
    "collectives/cache",
    "collectives/group_work",
    "collectives/process_group",
    "collectives/torch_backend",
    "comm_hooks",
    "comparison/launch",
    "comparison/rank",
    "constructor_checks",
    "distributed_autograd",
    "environment",
    "joining",
    "logging_data",
    "metrics",
    "mixed_precision",
    "parallel",
    "samplers",
}
MAY_READ_ENVIRONMENT = {"environment"}
MAY_USE_ZMQ = {"client/connection", "server/authentication", "server/daemon", "server/transport", "shared_secret"}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def runtime_imports(path: Path) -> set[str]:
    """Imports outside ``if TYPE_CHECKING``."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def layer_of(module: str) -> int:
    top = module.split("/")[0].split(".")[0]
    for index, layer in enumerate(LAYERS):
        if top in layer:
            return index
    raise AssertionError(f"psengine/{module}.py stands in no layer of this test; add it where it belongs")


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downward(module):
    for name in runtime_imports(MODULES[module]):
        if name.startswith("psengine."):
            assert layer_of(name.removeprefix("psengine.")) <= layer_of(module), f"{module} imports {name}"


@pytest.mark.parametrize("module", sorted(set(MODULES) - MAY_USE_TORCH_DISTRIBUTED))
def test_torch_distributed_stays_behind_its_line(module):
    used = {n for n in imports(MODULES[module]) if n.startswith(("torch.distributed", "torch._C._distributed"))}
    assert not used


@pytest.mark.parametrize("module", sorted(set(MODULES) - MAY_USE_ZMQ))
def test_sockets_stay_behind_their_line(module):
    used = {name for name in imports(MODULES[module]) if name.split(".")[0] == "zmq"}
    assert not used


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(("client/", "server/"))])
def test_client_and_server_meet_only_in_the_protocol(module):
    other = "psengine.server" if module.startswith("client/") else "psengine.client"
    assert not {name for name in imports(MODULES[module]) if name.startswith(other)}


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("protocol/")])
def test_the_protocol_knows_no_sockets_and_no_clock(module):
    assert not {"socket", "time", "zmq", "threading"} & {n.split(".")[0] for n in imports(MODULES[module])}


def test_importing_psengine_needs_torch_alone():
    program = (
        "import sys\n"
        "for name in ('zmq', 'msgpack', 'safetensors', 'xxhash', 'typer', 'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "import psengine\n"
        "try:\n"
        "    psengine.connect('tcp://127.0.0.1:7077')\n"
        "except psengine.errors.MissingExtraError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert install_command("server") in done.stdout


def test_the_command_needs_no_server_packages():
    program = (
        "import sys\n"
        "for name in ('zmq', 'msgpack', 'safetensors', 'xxhash', 'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "from psengine.cli.main import main\n"
        "main(sys.argv[1:])\n"
    )
    for arguments, code, text in (
        (["--help"], 0, "doctor"),
        (["status", "--servers", "tcp://127.0.0.1:1"], 2, "[server]"),
    ):
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        assert text in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", sorted(set(MODULES) - MAY_READ_ENVIRONMENT))
def test_only_one_module_reads_the_environment(module):
    tree = ast.parse(MODULES[module].read_text())
    reads = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")]
    assert not reads


@pytest.mark.parametrize("module", MODULES)
def test_nothing_unpickles_or_evaluates(module):
    tree = ast.parse(MODULES[module].read_text())
    assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & {
        n.split(".")[0] for n in imports(MODULES[module])
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert name not in {"eval", "exec"}, f"{module}:{node.lineno}"
            # torch.distributed's object collectives pickle; ctypes.py_object does not.
            is_collective = name.endswith(("_object", "_object_list")) and name != "py_object"
            assert not is_collective, f"{module}:{node.lineno}"
            assert ast.unparse(node.func) != "torch.load" or "weights_only=True" in ast.unparse(node), (
                f"{module}:{node.lineno}: torch.load without weights_only=True"
            )


def test_modules_stay_small():
    # House style: past 400 lines look for the second noun. The wrapper and the reducer mirror a native class each.
    too_long = {m: n for m, p in MODULES.items() if (n := len(p.read_text().splitlines())) > 620}
    assert not too_long
