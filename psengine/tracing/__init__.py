"""What happened when, and who keeps others waiting: timelines, clocks, the stall inspector, log lines.

May import ``tensors``, ``environment`` and ``errors``.
"""
