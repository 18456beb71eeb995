"""Bugs by name, to be planted one at a time: the simulator has to find each."""

from simulation.planted import applying, averaging, client, codecs, durability, membership, memory
from simulation.planted.registry import PLANTED, planted, seeds_until_found

__all__ = ["PLANTED", "planted", "seeds_until_found"]

# Importing one registers its bugs.
SUBJECTS = (applying, averaging, membership, memory, codecs, client, durability)
