"""The programs on the pages run as they stand there, and do what the text beside them says."""

import ast
import io
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_process import run_command
from support.processes import run_ranks
from support.server_process import running_server

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("deploy/**/*.md"))]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def programs(page: str) -> list[str]:
    """The blocks that are whole programs."""
    return [block for block in blocks(page) if "psengine.init(" in block and "import torch" in block]


def run_program(source: str, *options: object) -> dict[str, Any]:
    """Run it in this process, as the script ``train.py``; return its names."""
    sys.argv = ["train.py", *map(str, options)]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "train.py", "exec"), names)
    return names


def use(strategy: str, address: str, job: str) -> None:
    """Have the next model of this process agree in this way, at a server that does not know the job yet."""
    os.environ.update(PSENGINE_STRATEGY=strategy, PSENGINE_SERVERS=address, PSENGINE_JOB=job)


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES if "```python" in page.read_text()])
def test_the_blocks_of_a_page_are_python(page):
    for block in blocks(page):
        ast.parse(block)


def train_whole_and_in_parts(rank: int, world_size: int, strategies: list[str], address: str, directory: Path) -> None:
    program, _ = programs("docs/checkpoints.md")
    for strategy in strategies:
        for name, epochs in (("whole", 4), ("parts", 2), ("parts", 4)):
            use(strategy, address, f"{strategy}-{name}-{epochs}")
            run_program(program, "--checkpoint", directory / f"{strategy}-{name}.pt", "--epochs", epochs)
            torch.distributed.barrier()  # who resumes is started after worker 0 has written its last checkpoint


@pytest.mark.parametrize(
    ("strategies", "workers"), [(["sync", "sync:shard_optimizer=true", "sync-server"], 2), (["async"], 1)]
)
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(tmp_path, server, strategies, workers):
    run_ranks(train_whole_and_in_parts, workers, strategies, server.addresses[0], tmp_path)
    for strategy in strategies:
        whole, parts = (torch.load(tmp_path / f"{strategy}-{how}.pt", weights_only=True) for how in ("whole", "parts"))
        assert whole["epoch"] == parts["epoch"] == 4
        torch.testing.assert_close(parts, whole, rtol=0, atol=0)
        assert any(len(slots) for slots in whole["optimizer"]["state"].values())


def train_independently(rank: int, world_size: int, source: str, address: str, *options: object) -> tuple[str, Any]:
    """As ``psengine run --independent`` would start worker ``rank``: in a folder of all workers."""
    os.environ.update(PSENGINE_WORKER=str(rank), PSENGINE_WORKERS=str(world_size), PSENGINE_SERVERS=address)
    with redirect_stdout(io.StringIO()) as output:
        names = run_program(source, *options)
    return output.getvalue(), names


def train_in_folder(rank: int, world_size: int, source: str, address: str, folder: Path) -> str:
    os.chdir(folder)
    output, _ = train_independently(rank, world_size, source, address)
    return output


def test_independent_workers_go_on_from_the_servers_snapshot(tmp_path):
    _, program = programs("docs/checkpoints.md")
    (tmp_path / "snapshots").mkdir()
    for epochs, expected in ((2, "epoch 0 epoch 1"), (4, "epoch 2 epoch 3")):
        source = program.replace("EPOCHS = 4", f"EPOCHS = {epochs}")
        with running_server(snapshot_dir=str(tmp_path / "snapshots")) as server:
            outputs = run_ranks(train_in_folder, 2, source, server.addresses[0], tmp_path, init_group=False)
            for worker, output in enumerate(outputs):
                assert f"worker {worker}: " in output
                assert " ".join(re.findall(r"epoch \d", output)) == expected
            (job,) = server.job("default")
            assert job["version_max"] == 2 * epochs * 16, job
            server.terminate()
            assert server.wait() == 0


def train_at_servers(rank: int, world_size: int, address: str) -> tuple[str, str]:
    train, read = blocks("docs/servers/index.md")
    output, names = train_independently(rank, world_size, train, address, 15)
    with redirect_stdout(io.StringIO()) as read_output:
        run_program(read.replace("tcp://127.0.0.1:7077", address))
    assert names["context"].worker == rank
    return output, read_output.getvalue()


def test_the_tutorial_of_servers_trains_and_reads():
    with running_server() as server:  # its job is "default"
        outputs = run_ranks(train_at_servers, 2, server.addresses[0], init_group=False)
    for worker, (trained, read) in enumerate(outputs):
        assert re.fullmatch(rf"worker {worker}: loss \d+\.\d+\n", trained)
        assert read == "{'weight': (1, 8), 'bias': (1,)}\n"


def run_captured(rank: int, world_size: int, source: str) -> str:
    with redirect_stdout(io.StringIO()) as output:
        run_program(source)
    return output.getvalue()


def test_the_tutorial_of_launching_prints_once():
    (program,) = programs("docs/launching/index.md")
    assert run_ranks(run_captured, 2, program) == ["a job of 2: last loss 0.0000\n", ""]


def mean_loss(rank: int, world_size: int, source: str) -> float:
    torch.manual_seed(0)
    return float(run_program(source)["mean_loss"])


def test_the_program_of_the_quick_start_learns():
    (program,) = blocks("docs/quickstart.md")
    losses = run_ranks(mean_loss, 2, program.replace("psengine.shutdown()", ""))
    assert losses[0] == losses[1] < 0.5


def train_in_float16(
    rank: int, world_size: int, strategies: list[str], address: str
) -> list[tuple[dict[str, Any], list[float]]]:
    (program,) = programs("docs/precision.md")
    results = []
    for strategy in strategies:
        use(strategy, address, f"float16-{strategy}-{world_size}")
        names = run_program(program)
        results.append((names["network"].state_dict(), names["losses"]))
    return results


@pytest.mark.parametrize(("strategies", "workers"), [(["sync", "sync-server"], 2), (["sync", "async"], 1)])
def test_scaling_accumulating_and_clipping_take_the_same_steps(server, strategies, workers):
    (sync, other), *_ = run_ranks(train_in_float16, workers, strategies, server.addresses[0])
    torch.testing.assert_close(other, sync, rtol=0, atol=0)
    assert sync[1][-1] < 0.5 * sync[1][0]


@pytest.mark.parametrize(
    "options",
    [
        ("--workers", "2", "--strategy", "async"),
        pytest.param(("--workers", "2"), marks=pytest.mark.slow),
        pytest.param(("--workers", "2", "--independent", "--strategy", "async"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_the_readmes_program_learns_when_it_is_pasted(tmp_path, options):
    (program,) = programs("README.md")
    script = tmp_path / "train.py"
    script.write_text(program)
    code, output, errors = run_command(["run", "--no-prefix", *options, str(script)])
    assert code == 0, errors
    losses = [float(value) for value in re.findall(r"^epoch \d: .* (\d+\.\d+)$", output, re.MULTILINE)]
    assert len(losses) == 3, output  # the main process alone prints
    assert losses[-1] < losses[0]
    assert losses[-1] < 0.9  # of 1.39 before training
