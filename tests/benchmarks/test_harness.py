"""The harness of benchmarks/: who measures when, what becomes of the seconds, and what is written of them."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from harness import suite
from harness.figures import Case, Spread
from harness.machine import sentence
from harness.record import Record

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"cpu": "CPU", "cores": 2, "load": 0.5, "python": "3", "torch": "2", "psengine": "0", "kernel": "6"}
LOAD = {"others": 0.01, "elapsed_s": 12.0}


def record(name="all_reduce", **more):
    return Record(benchmark=name, question="How?", command="python", machine=MACHINE, load=LOAD, **more)


def test_a_ratio_is_of_one_round_and_not_of_medians():
    case = Case(labels={}, seconds={"ours": [1, 2, 30], "peer": [2, 4, 60]})
    assert case.ratios("ours", "peer") == Spread(0.5, 0.5, 0.5, 0.5)
    assert case.ratios("ours", "nobody") is None
    drifting = Case(labels={}, seconds={"ours": [1, 3, 2], "peer": [1, 1, 4]})
    assert drifting.ratios("ours", "peer").median == 1  # the medians' ratio is 2


def test_results_have_command_machine_load_caveat_and_the_failed_by_name(tmp_path):
    own = record(peers=("gloo",), caveats=["No MPI"])
    own.add({"ranks": 2, "size": "25 MB"}, {"psengine in place": [0.002], "gloo": [0.018]})
    records = {"all_reduce": own, "straggler": record("straggler", failed="exit code 3")}
    (tmp_path / "results").mkdir()
    for name, each in records.items():
        (tmp_path / "results" / f"{name}.json").write_text(each.to_json())
    suite.write_results(tmp_path, ["straggler"])
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.index("## straggler") < text.index("## all_reduce")
    for said in ("**No figures: exit code 3**", "`python`", sentence(MACHINE, LOAD), "- No MPI", "2.00 (2.00-2.00) ms"):
        assert said in text


def test_what_is_committed_is_made_of_the_committed_records(tmp_path):
    (tmp_path / "results").symlink_to(ROOT / "benchmarks" / "results")
    suite.write_results(tmp_path, list(suite.SUITE))
    again = "python benchmarks/harness/suite.py --write writes it"
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == (tmp_path / "RESULTS.md").read_text(), again


def test_a_benchmark_that_fails_or_hangs_is_named_and_the_others_go_on(tmp_path):
    options = argparse.Namespace(out=tmp_path, quick=False, ps_lite=None)
    assert suite.run("fusion_cuda", suite.Entry("fusion_cuda", "--rounds none"), options).startswith("exit code 2")
    assert suite.run("start_up", suite.Entry("start_up", limit_s=0.1), options) == "not finished within 0.1 s"
    records = {
        name: Record.from_json((tmp_path / "results" / f"{name}.json").read_text())
        for name in ("start_up", "fusion_cuda")
    }
    assert records["start_up"].failed == "not finished within 0.1 s"
    assert records["fusion_cuda"].command == "python benchmarks/fusion_cuda/run.py --rounds none"


QUICK = {
    "all_reduce": "--ranks 2 --sizes-kb 4",
    "server_throughput": "--sizes-mb 1 --workers 1 --rounds 1",
    "step_overhead": "--models small --ranks 2 --candidates plain,native,psengine --rounds 1",
    "straggler": "--candidates native --seconds 1",
    "start_up": "--what import",
    "tables": "--workers 1 --ids zipf --rows 1000 --rounds 1 --candidates async;echo",
    "codecs": "--kernels baseline --rounds 1",
    "fusion_cuda": "",
    "faults": "--study server-kills --tiers log",
    "accuracy": "--study codecs --tasks text --candidates none",
    "cluster": "--models small --layouts 2x1 --candidates none;hierarchical --deadline 100",
}


@pytest.mark.slow
@pytest.mark.parametrize("folder", list(QUICK))
def test_a_quick_run_writes_its_record(folder, tmp_path):
    if folder == "straggler" and not Path("/usr/share/datasets/fashion-mnist").exists():
        pytest.skip("Debian's dataset-fashion-mnist is not installed")
    program = str(ROOT / "benchmarks" / folder / "run.py")
    command = [sys.executable, program, "--quick", "--json", str(tmp_path / "r.json")]
    done = subprocess.run([*command, *QUICK[folder].split()], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = Record.from_json((tmp_path / "r.json").read_text())
    assert found.cases or found.tables or "Not measured" in found.caveats[0]
