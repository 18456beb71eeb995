"""Timelines, clocks, the stall inspector, log lines.

May import ``tensors``, ``environment`` and ``errors``.
"""
