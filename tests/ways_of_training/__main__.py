"""Print the table as Markdown."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ways_of_training.rows import ROWS
from ways_of_training.table import as_markdown

print(as_markdown(ROWS))
