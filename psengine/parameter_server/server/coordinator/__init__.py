"""The coordinator of a job: the one place that decides who takes part, and the only one that reads a clock. Pure."""

__all__: list[str] = []
