"""torch.optim's arithmetic on flat memory; pure.

May import ``protocol`` and ``errors``.
"""
