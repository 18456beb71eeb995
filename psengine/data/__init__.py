"""What a training loop holds besides the model: samplers, metrics, batch normalization over all ranks.

May import ``collectives`` and all that comes after it.
"""
