"""Which programs of other packages we hold ourselves to, and why not the others.

Each must pass over native DDP first: that is the oracle. README.md says with which versions of the packages they did.
"""

from __future__ import annotations

from outside.programs import Program
from outside.tiny_bert import HUB_NAME

SCRIPTS = "test_utils/scripts"
ON_TINY_BERT = ("--model_name_or_path", HUB_NAME, "--output_dir", "{directory}")
IN_SHORT = ("sync-shared_memory", "sync-server")
NO_HOOKS = "takes no communication hook; use strategy='sync'"

ACCELERATE = (
    Program(
        package="accelerate", path=f"{SCRIPTS}/test_script.py", short=("sync-shared_memory", "accelerator-sync-server")
    ),
    Program(package="accelerate", path=f"{SCRIPTS}/test_ops.py", short=("native-over-psengine",)),
    Program(package="accelerate", path=f"{SCRIPTS}/test_sync.py", is_shown_gpus=True, short=("sync-shared_memory",)),
    Program(
        package="accelerate",
        path=f"{SCRIPTS}/test_ddp_comm_hook.py",
        is_shown_gpus=True,
        short=IN_SHORT,
        refused={"sync-server": NO_HOOKS, "accelerator-sync-server": NO_HOOKS},
    ),
    # Its functions that concern a wrapped model; the others are about loaders, and take a quarter of a minute.
    Program(
        package="accelerate",
        path=f"{SCRIPTS}/test_distributed_data_loop.py",
        is_shown_gpus=True,
        short=IN_SHORT,
        calls=(
            ("test_default_ensures_even_batch_sizes", {}),
            ("test_can_disable_even_batches", {}),
            ("test_can_join_uneven_inputs", {}),
            ("test_join_can_override_even_batches", {}),
            ("test_join_can_override_for_mixed_type_dataloaders", {}),
            ("test_join_raises_warning_for_iterable_when_overriding_even_batches", {}),
            ("test_pickle_accelerator", {}),
        ),
    ),
    Program(
        package="accelerate",
        path=f"{SCRIPTS}/external_deps/test_metrics.py",
        has_stand_ins=True,
        needs=("transformers",),
        calls=(
            # main() leaves these to GPUs because they are slow with a real BERT.
            *(
                ("test_mrpc", {"dispatch_batches": dispatch, "split_batches": split})
                for dispatch in (True, False)
                for split in (True, False)
            ),
            ("test_gather_for_metrics_with_iterable_dataset", {}),
            ("test_gather_for_metrics_with_non_tensor_objects_iterable_dataset", {}),
            ("main", {}),  # last: it destroys the process group
        ),
    ),
    Program(
        package="accelerate",
        path=f"{SCRIPTS}/external_deps/test_checkpointing.py",
        has_stand_ins=True,
        needs=("transformers",),
        command_lines=(
            (*ON_TINY_BERT, "--partial_train_epoch", "1"),
            (*ON_TINY_BERT, "--resume_from_checkpoint", "{directory}/epoch_0"),
        ),
    ),
    Program(
        package="accelerate",
        path=f"{SCRIPTS}/external_deps/test_performance.py",
        has_stand_ins=True,
        needs=("transformers",),
        command_lines=((*ON_TINY_BERT, "--num_epochs", "2"),),
    ),
)

NOT_RUN_OF_ACCELERATE = {
    f"{SCRIPTS}/test_cli.py": "counts GPUs",
    f"{SCRIPTS}/test_merge_weights.py": "FSDP's checkpoints",
    f"{SCRIPTS}/test_notebook.py": "starts processes that wrap nothing",
    f"{SCRIPTS}/external_deps/test_ds_alst_ulysses_sp.py": "DeepSpeed",
    f"{SCRIPTS}/external_deps/test_ds_multiple_model.py": "DeepSpeed",
    f"{SCRIPTS}/external_deps/test_peak_memory_usage.py": "measures a GPU's memory; fails on the CPU natively too",
    f"{SCRIPTS}/external_deps/test_pippy.py": "pipeline parallelism",
    f"{SCRIPTS}/external_deps/test_zero3_integration.py": "DeepSpeed",
}

# By class of torch.testing._internal.distributed.ddp_under_dist_autograd_test, all of its tests that need no GPU.
DISTRIBUTED_AUTOGRAD = {
    "DdpComparisonTest": (
        "test_ddp_comparison",
        "test_ddp_comparison_uneven_inputs",
        "test_ddp_dist_autograd_sparse_grads",
        "test_ddp_dist_autograd_local_vs_remote",
    ),
    "DdpUnderDistAutogradTest": (
        "test_backward_no_ddp",
        "test_backward_ddp_outside",
        "test_backward_ddp_outside_uneven_inputs",
        "test_backward_ddp_inside",
    ),
}
WITHOUT_WRAPPER = {"test_backward_no_ddp"}
