"""Modules under the names they had."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from pathlib import Path

import pytest
from support.interpreters import running_program

import psengine
from psengine.former_names import MOVED


@pytest.mark.parametrize("name", MOVED)
def test_a_former_name_is_the_same_module(name, monkeypatch):
    for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.warns(DeprecationWarning, match=f"{name} is now {MOVED[name]}") as caught:
        module = importlib.import_module(name)
    assert module is importlib.import_module(MOVED[name])
    assert len(caught) == 1
    assert importlib.import_module(name) is module  # without another warning


def test_every_kind_of_import_works_and_says_where():
    program = (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import psengine\n"
        "    assert psengine.timeline_files.merge_parts\n"
        "    import psengine.parallel\n"
        "    from psengine.timeline_files import merge_parts\n"
        "    from psengine.client.client import connect\n"
        "    import psengine.comparison.settings as settings\n"
        "    from psengine import ops\n"
        "assert psengine.parallel.DistributedDataParallel is psengine.DistributedDataParallel\n"
        "assert connect is psengine.connect\n"
        "assert settings.Settings is psengine.comparison.Settings is psengine.verify.Settings\n"
        "assert {w.filename for w in caught} == {'program.py'}, [str(w) for w in caught]\n"
        "assert len(caught) >= 6\n"
        "assert ops.native_available() in (True, False)\n"
    )
    with running_program(program, {**os.environ, "PYTHONPATH": str(Path(psengine.__file__).parents[1])}) as run:
        assert run.wait() == 0, run.stderr


def test_what_was_pickled_under_a_former_name_loads(monkeypatch):
    monkeypatch.delitem(sys.modules, "psengine.parallel", raising=False)
    with pytest.warns(DeprecationWarning, match="psengine.parallel is now psengine.wrapper.ddp"):
        loaded = pickle.loads(b"cpsengine.parallel\nDistributedDataParallel\n.")
    assert loaded is psengine.DistributedDataParallel
