"""Draw one frame of ``psengine top`` as it is on a terminal, with rich, from servers that run.

psengine run --workers 3 --strategy async --status-port 9100 train.py
python docs/images/top_picture.py http://127.0.0.1:9100 docs/images/top.svg
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from psengine.cli.status_sources import open_sources
from psengine.cli.top import Watch

POLLS = 4  # a rate needs two answers


def main() -> None:
    address, output = sys.argv[1:]
    console = Console(record=True, force_terminal=True, width=118, file=io.StringIO())
    with Watch(open_sources(address, timeout_s=5.0), interval_s=1.0) as watch:
        if not watch.wait_for(POLLS, timeout_s=30.0):
            raise SystemExit(f"{address} did not answer {POLLS} times in 30 s")
        console.print(watch.look())
    picture = console.export_svg(title="psengine top")
    # The reader's own monospaced font: no page of ours loads anything from elsewhere.
    Path(output).write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main()
