"""The lines between the layers, read off the imports."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from support.interpreters import running_program

import psengine
from psengine.environment.installation import install_command

PACKAGE = Path(psengine.__file__).parent
MODULES = {str(p.relative_to(PACKAGE).with_suffix("")): p for p in sorted(PACKAGE.rglob("*.py"))}

# The folders in the order of the data's way: a folder's place is its floor, and no import runs upward.
FLOORS = [
    "cli",
    "integrations",
    "verify",
    "__init__",
    "api",
    "wrapper",
    "wrapper/native_features",
    "data",
    "gradients",
    "strategies",
    "collectives",
    "parameter_server/client",
    "parameter_server/server",
    "parameter_server/server/status",
    "parameter_server/server/durability",
    "parameter_server/server/transport",
    "parameter_server/server/core",
    "parameter_server/server/rules",
    "parameter_server/server/snapshots",
    "parameter_server/server/log",
    "parameter_server",
    "tracing",
    "status_port",
    "tensors",
    "codecs",
    "flat_optimizers",
    "protocol",
    "kernels",
    "environment",
    "specification",
    "errors",
    "version",
]
MAY_USE_TORCH_DISTRIBUTED = {
    "cli/bench_worker",
    "cli/launching/elastic",
    "cli/launching/nodes",
    "cli/launching/torchrun_options",
    "data/coordination",
    "data/metrics",
    "data/value_exchange",
    "environment/backends",
    "environment/context",
    "gradients/hooks",
    "verify/ranks",
    "wrapper/arguments",
    "wrapper/ddp",
    "wrapper/forward_pass",
    "wrapper/native_features/comm_hooks",
    "wrapper/native_features/logging_data",
    "wrapper/native_features/mixed_precision",
}
# What a simulation runs under a clock of its own, and what gives them to it in a process.
IS_GIVEN_TIME = (
    "parameter_server/server/core/",
    "parameter_server/server/rules/",
    "parameter_server/server/log/",
    "parameter_server/client/",
)
GIVES_TIME = {
    "parameter_server/client/connection",
    "parameter_server/client/embedded",
    "parameter_server/client/process_runtime",
}
# Functions that decide by an error's text, because whoever raises it has neither a type nor a code for the case.
MAY_READ_ERROR_TEXTS = {
    ("cli/doctor_checks/findings", "problem_of"): "shows what an error is about, once",
    ("collectives/c10d", "_is_transport_error"): "gloo's errors are plain RuntimeErrors",
}
# Above 400 lines; the first lines of each say why it is one file.
MAY_BE_LONG = {"protocol/bodies"}
MAY_READ_ENVIRONMENT = {"environment/variables"}
MAY_USE_ZMQ = {
    "parameter_server/client/connection",
    "parameter_server/client/handshake_monitor",
    "parameter_server/keepalive",
    "parameter_server/server/transport/authentication",
    "parameter_server/server/listening",
    "parameter_server/server/transport/endpoint",
    "parameter_server/shared_secret",
    "parameter_server/uncopied",
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@cache
def house_imports(module: str) -> set[str]:
    """The modules of psengine that this one names in imports, for types and inside functions too."""
    found = set()
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "psengine" and parts[1:] != ["_native"]:
                # The longest part of the name that is a module; the rest is a name in it.
                heads = ["/".join(parts[1:end]) for end in range(len(parts), 0, -1)]
                found.add(next(m for head in heads for m in (head, f"{head}/__init__".lstrip("/")) if m in MODULES))
    return found


def floor_of(module: str) -> int:
    folders = [f for f in FLOORS if module == f or module.startswith(f"{f}/")]
    assert folders, f"psengine/{module}.py is in no folder of this test; add it where it belongs"
    return FLOORS.index(max(folders, key=len))


def test_imports_go_downward():
    assert not {
        (module, other) for module in MODULES for other in house_imports(module) if floor_of(other) < floor_of(module)
    }


def test_no_modules_import_each_other_in_a_circle():
    TopologicalSorter({module: house_imports(module) for module in MODULES}).prepare()


def test_few_modules_stand_at_the_top():
    assert len(list(PACKAGE.glob("*.py"))) <= 6


def importing(modules: Iterable[str], *packages: str) -> set[tuple[str, str]]:
    """Which of ``modules`` import what of ``packages``."""
    within = tuple(f"{package}." for package in packages)
    return {(m, name) for m in modules for name in imports(MODULES[m]) if name in packages or name.startswith(within)}


def test_torch_distributed_stays_behind_its_line():
    # Another collective is one file there, and its line in the registry.
    others = {name for name in MODULES if not name.startswith("collectives/")} - MAY_USE_TORCH_DISTRIBUTED
    internal = [f"torch._C._distributed_{part}" for part in ("c10d", "autograd", "rpc")]
    assert not importing(others, "torch.distributed", *internal)


def test_sockets_stay_behind_their_line():
    assert not importing(set(MODULES) - MAY_USE_ZMQ, "zmq")


def modules_in(*folders: str) -> list[str]:
    return [module for module in MODULES if module.startswith(folders)]


def test_client_and_server_meet_only_in_the_protocol():
    assert not importing(modules_in("parameter_server/client/"), "psengine.parameter_server.server")
    assert not importing(modules_in("parameter_server/server/"), "psengine.parameter_server.client")


def test_the_protocol_knows_no_sockets_and_no_clock():
    assert not importing(modules_in("protocol/"), "socket", "time", "zmq", "threading")


def test_importing_psengine_needs_torch_alone_and_the_command_no_server_packages():
    program = (
        "import sys\n"
        "for name in ('zmq', 'msgpack', 'safetensors', 'xxhash', 'prometheus_client', 'typer'):\n"
        "    sys.modules[name] = None\n"
        "import psengine\n"
        "try:\n"
        "    psengine.connect('tcp://127.0.0.1:7077')\n"
        "except psengine.errors.MissingExtraError as error:\n"
        "    print(error)\n"
        "del sys.modules['typer']\n"
        "from psengine.cli.main import main\n"
        "for line in (['--help'], ['status', '--server-address', 'tcp://127.0.0.1:1']):\n"
        "    try:\n"
        "        main(line)\n"
        "    except SystemExit as end:\n"
        "        print('ended with', end.code)\n"
    )
    with running_program(program, {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}) as done:
        assert done.wait() == 0, done.stderr
        stdout, stderr = done.stdout, done.stderr
    assert install_command("server") in stdout
    assert "doctor" in stdout
    assert re.findall(r"ended with (\d)", stdout) == ["0", "2"]
    assert install_command("server") in stderr


def test_only_one_module_reads_the_environment():
    for module in set(MODULES) - MAY_READ_ENVIRONMENT:
        attributes = {n.attr for n in ast.walk(tree_of(MODULES[module])) if isinstance(n, ast.Attribute)}
        assert not attributes & {"environ", "getenv"}, module


def test_client_and_server_are_given_their_clocks_and_take_none():
    given = [m for m in MODULES if m.startswith(IS_GIVEN_TIME) and m not in GIVES_TIME]
    assert not importing(given, "time", "datetime", "random", "secrets")


TEXT_TESTS = {"startswith", "endswith", "find", "index", "count", "match", "search", "fullmatch", "findall"}


def reads_text(node: ast.AST, texts: set[str], errors: set[str]) -> bool:
    """Whether an expression is made of a variable in ``texts``, or of the text of a variable in ``errors``."""
    parts = list(ast.walk(node))
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    makes_text = any(isinstance(part, ast.Attribute) and part.attr == "args" for part in parts)
    return bool(names & texts) or bool(names & errors and (makes_text or names & {"str", "repr"}))


def decisions_on_error_texts(tree: ast.AST) -> set[str]:
    """Functions in which a caught error's text, or a part of it, is compared with something or searched."""
    found = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        annotated = {a.arg: ast.unparse(a.annotation) for a in function.args.args if a.annotation is not None}
        errors = {name for name, kind in annotated.items() if "Error" in kind or "Exception" in kind}
        errors |= {n.name for n in ast.walk(function) if isinstance(n, ast.ExceptHandler) and n.name}

        texts: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and reads_text(node.value, texts, errors):
                parts = [part for t in node.targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])]
                texts |= {part.id for part in parts if isinstance(part, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Compare):
                decides = any(reads_text(side, texts, errors) for side in (node.left, *node.comparators))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TEXT_TESTS:
                decides = any(reads_text(side, texts, errors) for side in (node.func.value, *node.args))
            else:
                continue
            if decides:
                found.add(function.name)
    return found


def test_no_decision_reads_the_text_of_an_error():
    found = {
        (module, function) for module, path in MODULES.items() for function in decisions_on_error_texts(tree_of(path))
    }
    assert found == set(MAY_READ_ERROR_TEXTS), "a type, a status code or a kind decides; a text is for people"


def test_nothing_unpickles_or_evaluates():
    assert not importing(MODULES, "pickle", "marshal", "shelve", "dill", "cloudpickle")
    for module, path in MODULES.items():
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert name not in {"eval", "exec"}, f"{module}:{node.lineno}"
            # torch.distributed's object collectives pickle; ctypes.py_object does not.
            is_collective = name.endswith(("_object", "_object_list")) and name != "py_object"
            assert not is_collective, f"{module}:{node.lineno}"
            assert ast.unparse(node.func) != "torch.load" or "weights_only=True" in ast.unparse(node), (
                f"{module}:{node.lineno}: torch.load without weights_only=True"
            )


def test_modules_stay_small():
    # House style: past 400 lines look for the second noun.
    too_long = {m for m, p in MODULES.items() if len(p.read_text().splitlines()) > 400}
    assert too_long == MAY_BE_LONG


# ---- the tests themselves --------------------------------------------------------------------------------------------

TESTS = Path(__file__).parents[1]
TEST_FILES = {str(p.relative_to(TESTS)): p for p in sorted(TESTS.rglob("*.py"))}


def test_every_test_stands_in_the_folder_of_what_it_tests():
    assert not list(TESTS.glob("*.py"))


def test_tests_share_by_way_of_support_alone():
    helpers = {p.stem for p in (TESTS / "support").glob("*.py")} - {p.name for p in TESTS.iterdir()}
    for name, path in TEST_FILES.items():
        parts = [imported.split(".") for imported in imports(path)]
        assert not [p for p in parts if p[0] == "tests" or any(q.startswith("test_") for q in p[:-1])], name
        assert not {p[0] for p in parts} & helpers, f"{name}: expected support.NAME"


@cache
def names_in(module: str) -> set[str]:
    """What other files may import from a module: what it binds at its top, in a condition too."""
    found = set()
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_tests_import_what_is_there():
    """Inside functions too, where no run of the tests may come by."""
    missing = set()
    for name, path in TEST_FILES.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "psengine":
                place = "/".join(node.module.split(".")[1:])
                module = place if place in MODULES else f"{place}/__init__".lstrip("/")
                known = names_in(module) if module in MODULES else set()
                if module == "__init__":
                    known |= names_in("api")  # which it loads when one of them is used
                modules = {m.removesuffix("/__init__").rpartition("/")[2] for m in modules_in(f"{place}/".lstrip("/"))}
                missing |= {(name, f"{node.module}.{n.name}") for n in node.names if n.name not in known | modules}
    assert not missing
