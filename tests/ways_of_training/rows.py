"""All rows: importing a subject enters its rows in the table."""

from ways_of_training import recomputation, skipped_batches
from ways_of_training.table import ROWS

__all__ = ["ROWS", "recomputation", "skipped_batches"]
