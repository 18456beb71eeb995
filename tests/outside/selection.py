"""Which programs of accelerate we hold ourselves to. Each must pass over native DDP first: that is the oracle."""

from __future__ import annotations

from outside.programs import Program

SCRIPTS = "test_utils/scripts"
IN_SHORT = ("sync-shared_memory", "sync-server")
NO_HOOKS = "takes no communication hook; use strategy='sync'"

ACCELERATE = (
    Program(path=f"{SCRIPTS}/test_script.py", short=("sync-shared_memory", "accelerator-sync-server")),
    Program(path=f"{SCRIPTS}/test_sync.py", is_shown_gpus=True, short=("sync-shared_memory",)),
    Program(
        path=f"{SCRIPTS}/test_ddp_comm_hook.py",
        is_shown_gpus=True,
        short=IN_SHORT,
        refused={"sync-server": NO_HOOKS, "accelerator-sync-server": NO_HOOKS},
    ),
)
