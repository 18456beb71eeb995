"""``psengine run --replace-ddp`` puts this folder on PYTHONPATH, so that Python runs ``sitecustomize.py`` at its start.

It has no other module: all of them could be imported by their bare names.
"""
