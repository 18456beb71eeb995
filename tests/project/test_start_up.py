"""What start-up does not import. No time is asserted here: benchmarks/start_up measures it."""

import os
import subprocess
import sys
from pathlib import Path

import psengine
from psengine.cli import main

SOURCES = Path(psengine.__file__).parents[1]
# Slow to import, or for some commands only.
OPTIONAL = (
    *("prometheus_client", "typer", "rich", "matplotlib", "sklearn", "ssl", "asyncio", "sqlite3", "xml"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.run", "torch.distributed.elastic.agent"),
    *("psengine.cli", "psengine.verify", "psengine.integrations", "psengine.parameter_server.server"),
    *("psengine.status_port.http_status", "psengine.status_port.pages"),
)
# torch imports much of the standard library itself: only what was not there before counts.
IMPORTED = """
import sys

def imported(optional):
    names = set(sys.modules) - before
    return sorted(name for name in names if any(name == one or name.startswith(one + ".") for one in optional))
"""
# torch cannot be imported in this program.
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


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED + program],
        env={**os.environ, "PYTHONPATH": str(SOURCES), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_psengine_imports_no_torch_and_registers_its_backend_once_torch_is_there():
    optional = ("torch", "numpy", "zmq", *OPTIONAL)
    run(
        "before = set(sys.modules)\n"
        "import psengine\n"
        f"assert not imported({optional!r}), imported({optional!r})\n"
        "import torch.distributed\n"
        "assert 'psengine' in torch.distributed.Backend.backend_list\n"
        "assert 'psengine.api' not in sys.modules\n"
        "assert {'DistributedDataParallel', 'AsyncServer', 'connect', '__version__'} <= set(dir(psengine))\n"
        "before = set(sys.modules)\n"
        "from psengine import *\n"
        f"assert not imported({OPTIONAL!r}), imported({OPTIONAL!r})\n"
        "assert barrier is psengine.barrier and psengine.errors.ConfigurationError is ConfigurationError\n"
        "assert not hasattr(psengine, 'baryer') and not hasattr(psengine, '__wrapped__')\n"
    )


def test_help_usage_errors_and_completion_do_not_import_torch():
    lines = [["--help"], ["--version"], [], *([name, "--help"] for name in main.COMMANDS)]
    text = run(
        WITHOUT_TORCH + f"assert [ask(main.main, *line) for line in {lines!r}] == [0, 0, 2] + [0] * {len(lines) - 3}\n"
        "assert ask(server.main, '--help') == ask(server.main, 'keygen', '--help') == 0\n"
        "assert ask(main.main, 'doctor', '--only', 'nothing') == ask(main.main, 'verfy') == 2\n"
        "assert not imported(['numpy', 'psengine.parameter_server.server.daemon'])",
        PSENGINE_SERVERS="",
    )
    for name in main.COMMANDS:
        assert f"psengine {name} " in text
    shell = {"_PSENGINE_COMPLETE": "complete_bash", "COMP_WORDS": "psengine st", "COMP_CWORD": "1"}
    assert run(WITHOUT_TORCH + "assert ask(main.main) == 0", **shell).split() == ["status"]


def test_a_command_loads_no_other_command():
    others = [f"psengine.cli.{name}" for name in main.COMMANDS if name != "run"]
    run(
        WITHOUT_TORCH + "assert ask(main.main, 'run', '--help') == 0\n"
        f"assert not imported({others!r}), imported({others!r})"
    )


def test_servers_are_launched_before_torch_is_imported():
    """So servers import it at the same time as the launcher."""
    line = ["run", "--workers", "2", "--strategy", "async:max_staleness=4", "--servers", "2", "no_such_script.py"]
    text = run(
        WITHOUT_TORCH + "from psengine.cli.launching import servers\n"
        "from unittest.mock import MagicMock\n"
        "servers.launch = lambda: print('launched') or MagicMock()\n"
        f"try:\n    ask(main.main, *{line!r})\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    *launched, error = text.splitlines()
    assert launched == ["launched", "launched"]
    assert "torch" in error
