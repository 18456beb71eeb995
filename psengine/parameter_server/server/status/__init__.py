"""The status port: dashboard, health, history, metrics.

May import ``durability`` and the rooms after it, ``environment`` and ``errors``.
"""
