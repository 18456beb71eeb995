"""The collective of several hosts: shared memory inside them, torch.distributed between them."""
