"""``python -m psengine run train.py``: the command ``psengine`` of this interpreter."""

from psengine.cli.main import main

main()
