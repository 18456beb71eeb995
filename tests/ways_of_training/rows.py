"""All rows: importing a subject enters its rows in the table."""

from importlib import import_module

from ways_of_training.table import ROWS

SUBJECTS = (
    *("wrapping", "outputs", "layers", "buffers", "freezing", "precision", "gradients", "accumulation"),
    *("recomputation", "skipped_batches", "hooks", "optimizers", "loops", "saving", "companions"),
)

for subject in SUBJECTS:
    import_module(f"ways_of_training.{subject}")

__all__ = ["ROWS"]
