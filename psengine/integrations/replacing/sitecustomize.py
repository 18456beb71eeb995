"""Run by every Python process of ``psengine run --replace-ddp`` at its start, also those that its workers start."""

import importlib
import os
import sys
from importlib.machinery import PathFinder

_here = os.path.dirname(__file__)
_root = os.path.dirname(os.path.dirname(os.path.dirname(_here)))
sys.path.remove(_here)
sys.path.insert(0, _root)  # the launcher's psengine, wherever this process would look for one
from psengine.environment.imports import after_import  # noqa: E402

sys.path.remove(_root)
after_import("torch", lambda _: importlib.import_module("psengine.integrations.native_scripts").install())
# Python imports one module of this name: the one that it would have imported runs here.
_other = PathFinder.find_spec(__name__)
if _other is not None and _other.loader is not None:
    _other.loader.exec_module(sys.modules[__name__])
