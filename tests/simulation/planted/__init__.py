"""Bugs by name, to be planted one at a time: the simulator has to find each."""

from simulation.planted import client, coordinator, durability, elastic, replication, rules, tables
from simulation.planted.registry import PLANTED, planted, seeds_until_found

__all__ = ["PLANTED", "planted", "seeds_until_found"]

# Importing one registers its bugs.
SUBJECTS = (rules, coordinator, client, durability, elastic, replication, tables)
