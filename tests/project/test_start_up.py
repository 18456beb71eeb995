"""What is not imported: start-up stays short if it loads only what it uses. No time is asserted here.

benchmarks/start_up measures the times.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.interpreters import running_program

import psengine
from psengine.cli import main
from psengine.strategies.registry import STRATEGIES

SOURCES = Path(psengine.__file__).parents[1]
# Packages that only some strategies or commands use, and modules of the standard library that are slow to import.
OPTIONAL = (
    *("zmq", "msgpack", "safetensors", "xxhash", "prometheus_client", "typer", "rich", "matplotlib", "sklearn"),
    *("http", "ssl", "asyncio", "multiprocessing.connection", "email", "sqlite3", "xml"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.run", "torch.distributed.elastic.agent"),
    *("psengine.cli", "psengine.verify", "psengine.integrations", "psengine.parameter_server.server"),
    *("psengine.parameter_server.client.client", "psengine.strategies.servers.asynchronous", "psengine.status_port"),
)
# What the program imports is only what was not there before: torch imports much of the standard library itself.
IMPORTED = """
import sys

def imported(optional):
    names = set(sys.modules) - before
    return sorted(name for name in names if any(name == one or name.startswith(one + ".") for one in optional))
"""


def run(program: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED + program, *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCES), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_psengine_imports_neither_torch_nor_what_only_some_use():
    optional = ("torch", "numpy", *OPTIONAL)
    run(f"before = set(sys.modules)\nimport psengine\nassert not imported({optional!r}), imported({optional!r})")


def test_the_public_names_of_a_training_without_servers_import_nothing_that_it_does_not_use():
    names = sorted(set(psengine.__all__) - {"AsyncServer", "DilocoServer", "SyncServer", "Client", "connect"})
    program = (
        "import torch\n"
        "before = set(sys.modules)\n"
        "import psengine\n"
        f"for name in {names!r}: getattr(psengine, name)\n"
        "psengine.strategies.registry.resolve_strategy('sync')\n"
        f"assert not imported({OPTIONAL!r}), imported({OPTIONAL!r})"
    )
    with running_program(IMPORTED + program, {**os.environ, "PYTHONPATH": str(SOURCES)}) as done:
        assert done.wait() == 0, done.stderr


# torch cannot be imported in this program: whatever tries it fails.
WITHOUT_TORCH = """
sys.modules["torch"] = None
before = set(sys.modules)
from psengine.cli import main, server

def ask(command, *line):
    try:
        command(list(line))
    except SystemExit as end:
        return end.code
"""


def test_help_and_usage_errors_do_not_import_torch():
    lines = [["--help"], ["--version"], [], *([name, "--help"] for name in main.COMMANDS), ["admin", "drain", "--help"]]
    text = run(
        WITHOUT_TORCH + f"assert [ask(main.main, *line) for line in {lines!r}] == [0, 0, 2] + [0] * {len(lines) - 3}\n"
        "assert ask(server.main, '--help') == ask(server.main, 'keygen', '--help') == 0\n"
        "assert ask(main.main, 'doctor', '--only', 'nothing') == ask(main.main, 'verfy') == 2\n"
        "assert not imported(['zmq.asyncio', 'numpy', 'asyncio', 'psengine.parameter_server.server.daemon'])",
        PSENGINE_SERVERS="",
    )
    for name in main.COMMANDS:
        assert f"psengine {name} " in text


def test_a_command_loads_no_other_command():
    run(
        WITHOUT_TORCH + "assert ask(main.main, 'run', '--help') == 0\n"
        "others = ['verify', 'status', 'admin', 'doctor', 'advise', 'top']\n"
        "assert not imported([f'psengine.cli.{name}' for name in others] + ['ssl', 'http'])"
    )


def test_completion_and_status_over_http_do_not_import_torch():
    shell = {"_PSENGINE_COMPLETE": "complete_bash", "COMP_WORDS": "psengine st", "COMP_CWORD": "1"}
    assert run(WITHOUT_TORCH + "assert ask(main.main) == 0", **shell).split() == ["status"]
    run(WITHOUT_TORCH + "assert ask(main.main, 'status', '--server-address', 'http://127.0.0.1:1') == 1")


def test_the_line_of_a_training_is_read_before_torch_is_imported():
    """So servers are launched before, and import it at the same time as the launcher."""
    line = ["run", "--workers", "2", "--strategy", "async:max_staleness=4", "--servers", "2", "no_such_script.py"]
    text = run(
        WITHOUT_TORCH + "from psengine.cli import run\n"
        "from psengine.cli.launching import servers\n"
        "servers.launch = lambda: print('launched')\n"
        "servers.discard = lambda process: None\n"
        f"try:\n    ask(main.main, *{line!r})\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    *launched, error = text.splitlines()
    assert launched == ["launched", "launched"]
    assert "torch" in error


def test_every_command_is_in_the_module_that_the_table_names():
    from typer.main import get_command

    assert set(get_command(main.build_app()).commands) == set(main.COMMANDS)
    for name, module in main.COMMANDS.items():
        commands = get_command(main.build_app(name)).commands
        assert name in commands
        assert {main.COMMANDS[one] for one in commands} == {module}


def test_a_strategy_that_is_loaded_later_has_the_name_it_is_registered_under():
    assert {name: STRATEGIES[name].name for name in ("sync-server", "async")} == {
        "sync-server": "sync-server",
        "async": "async",
    }
    assert psengine.AsyncServer is STRATEGIES["async"]
    assert psengine.SyncServer is STRATEGIES["sync-server"]


def test_psengine_imported_before_torch_registers_its_backend_and_shows_its_names():
    run(
        "import psengine\n"
        "assert 'torch' not in sys.modules\n"
        "import torch.distributed\n"
        "assert 'psengine' in torch.distributed.Backend.backend_list\n"
        "assert 'psengine.api' not in sys.modules\n"
        "assert {'DistributedDataParallel', 'AsyncServer', 'connect', '__version__'} <= set(dir(psengine))\n"
        "from psengine import *\n"
        "assert barrier is psengine.barrier and psengine.errors.ConfigurationError is ConfigurationError\n"
        "for name in ('baryer', '_barrier', 'STRATEGIES', '__wrapped__'):\n"
        "    try:\n"
        "        getattr(psengine, name)\n"
        "    except AttributeError as error:\n"
        "        assert str(error) == f\"module 'psengine' has no attribute {name!r}\"\n"
        "    else:\n"
        "        raise SystemExit(name)\n"
    )


@pytest.mark.slow
def test_a_type_checker_sees_the_public_names_and_no_others(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import psengine\n"
        "reveal_type(psengine.DistributedDataParallel)\n"
        "reveal_type(psengine.AsyncServer)\n"
        "reveal_type(psengine.connect)\n"
        "psengine.baryer()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(tmp_path), str(program)],
        env={**os.environ, "MYPYPATH": str(SOURCES)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert 'Revealed type is "def (' in done.stdout, done.stdout + done.stderr
    shown = [line for line in done.stdout.splitlines() if line.startswith("program.py")]
    assert [line.split(": ")[1] for line in shown] == ["note", "note", "note", "error"], done.stdout
    assert 'Module has no attribute "baryer"' in shown[3]
