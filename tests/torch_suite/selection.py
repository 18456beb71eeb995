"""Which of torch's DistributedDataParallel tests we hold ourselves to, and why not the others.

All whose names say that they are about a wrapped model: what torch's own class passes, psengine must pass. Each test
runs on 2 ranks; those in ``ALSO_ON_FOUR_RANKS`` do more on 4.
"""

import ast
import re
from pathlib import Path

import torch

ABOUT_WRAPPED_MODELS = re.compile(
    "ddp|DDP|DataParallel|data_parallel|SyncBatchNorm|sync_bn|static_graph|no_sync|localSGD|unused|across_rank"
    "|grad_parity|get_future|bucket_assignment"
)
NOT_RUN = {
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": "needs a logger, and ours has none",
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_ddp_device": "tests the rank's GPU",
    "test_ddp_logging_data_gpu": "tests the rank's GPU",
    "test_ddp_has_finalized": "needs NCCL",
    "test_ddp_profiling_execution_trace": "needs NCCL",
    "test_ddp_static_graph_nested_types": "wraps a wrapped model, which psengine refuses",
    "test_DistributedDataParallel_non_default_stream": "does on the CPU what test_DistributedDataParallel does",
}


def names_in_the_wheel() -> list[str]:
    """Read, not imported: the class must be replaced before."""
    source = Path(torch.__file__).parent / "testing" / "_internal" / "distributed" / "distributed_test.py"
    classes = (node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.ClassDef))
    (suite,) = (node for node in classes if node.name == "_DistTestBase")
    names = [node.name for node in suite.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name.startswith("test_") and ABOUT_WRAPPED_MODELS.search(name)]


IN_THE_WHEEL = names_in_the_wheel()

# (a) On gloo and the CPU as they are.
ON_CPU = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
    "test_dump_DDP_relevant_env_vars",
    "test_get_future",
    "test_grads_same_across_ranks_with_no_sync",
    "test_static_graph_api_cpu",
)

# (b) With SyncBatchNorm, which torch has for GPUs only and psengine for the CPU too: here the oracle cannot run.
WITH_SYNC_BATCHNORM = [
    name for name in IN_THE_WHEEL if re.search("SyncBatchNorm|sync_bn|ddp_inference", name) and name not in NOT_RUN
]

# (c) Written for GPUs; what they test is no matter of the device, so cpu_for_gpu.py runs them on the CPU.
FOR_GPU = [
    *(name for name in IN_THE_WHEEL if name not in {*NOT_RUN, *ON_CPU, *WITH_SYNC_BATCHNORM}),
    *("test_optimizer_in_hook_adamw", "test_optimizer_in_hook_sgd"),  # suite.py has them
]

# Of the above, what torch skips everywhere, for reasons that do not hold on gloo and the CPU.
SKIPPED_BY_TORCH = {
    "test_DistributedDataParallel": "hangs on its GPU machines (pytorch#77317)",
    "test_ddp_hook_pickling_powerSGD": "'flaky'",
    "test_ddp_model_diff_shape_across_ranks": "hangs on NCCL (pytorch#162676)",
    "test_ddp_profiling_autograd_profiler": "CUDA events (pytorch#77342)",
    "test_ddp_sync_bn_training_vs_eval": "CUDA profiler events (pytorch#113620)",
}

# They count the events that gloo leaves in a profile.
LOOKS_FOR_GLOO = ("test_ddp_profiling_autograd_profiler", "test_ddp_profiling_torch_profiler")

# What they do depends on the world size: groups of groups, a 2-D mesh, ranks that leave one after the other.
ALSO_ON_FOUR_RANKS = (
    "test_DistributedDataParallelCPU",
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_device_mesh_initialization",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_join_model_equivalence",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_inputs",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    "test_skip_all_reduce_unused_parameters",
)

# (name, world size) of what costs more than 5 s here; `make test-slow` runs them.
SLOW = {
    ("test_ddp_apply_optim_in_backward", 2),
    ("test_ddp_compile_static_graph", 2),
    ("test_ddp_model_diff_shape_across_ranks", 2),
    ("test_ddp_uneven_inputs", 2),
    ("test_ddp_uneven_inputs", 4),
    ("test_optimizer_in_hook_adamw", 2),
}
