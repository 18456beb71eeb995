"""The status port: dashboard, health, metrics.

May import ``durability`` and the rooms after it, ``environment`` and ``errors``.
"""
