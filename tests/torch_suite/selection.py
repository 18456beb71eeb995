"""Which of torch's DistributedDataParallel tests we hold ourselves to, and why not the others.

Found by running every test of torch 2.13's suite that touches DistributedDataParallel with torch's own class: what the
oracle passes, psengine must pass. Each test runs on 2 ranks; those in ``ALSO_ON_FOUR_RANKS`` do more on 4.
"""

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

# (b) Written for GPUs; what they test is no matter of the device, so cpu_for_gpu.py runs them on the CPU.
FOR_GPU = (
    "test_DistributedDataParallel",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
    "test_ddp_apply_optim_in_backward",
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
    "test_ddp_apply_optim_in_backward_ignored_params",
    "test_ddp_broadcast_buffer",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_broadcast_buffers_deprecation_warning",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_build_debug_param_to_name_mapping",
    "test_ddp_build_debug_param_to_name_mapping_requires_grad",
    "test_ddp_comm_hook_logging",
    "test_ddp_compile_static_graph",
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_control_flow_same_across_ranks",
    "test_ddp_device_mesh_initialization",
    "test_ddp_forward_backward_hook",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_hook_parity_allreduce_process_group",
    "test_ddp_hook_parity_post_localSGD",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_hook_pickling_powerSGD",
    "test_ddp_ignore_params_arg",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_join_model_equivalence",
    "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_model_diff_shape_across_ranks",
    "test_ddp_multiple_nested_unused_params_err_ignore_params",
    "test_ddp_multiple_nested_unused_params_error",
    "test_ddp_namedtuple",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
    "test_ddp_native_mixed_precision_ignored_params",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_profiling_autograd_profiler",
    "test_ddp_profiling_torch_profiler",
    "test_ddp_python_error_logged",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_sink_noclone",
    "test_ddp_sync_module_states",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_uneven_inputs",
    "test_ddp_unused_params_rebuild_buckets_exception",
    "test_ddp_zero_output_features",
    "test_detect_ddp_is_actually_static",
    "test_different_graph_across_ranks",
    "test_get_data_parallel_params",
    "test_invalid_static_graph",
    "test_optimizer_in_hook_adamw",
    "test_optimizer_in_hook_sgd",
    "test_output_unused_in_loss_dict_module",
    "test_output_unused_in_loss_tuple_module",
    "test_post_localSGD_optimizer_parity",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    "test_post_localSGD_optimizer_step_reload",
    "test_skip_all_reduce_unused_parameters",
    "test_stateless_api_with_ddp",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
    "test_verify_model_across_rank_with_logger",
    "test_verify_model_across_rank_without_logger",
)

# (c) With SyncBatchNorm, which torch has for GPUs only and psengine for the CPU too: here the oracle cannot run.
WITH_SYNC_BATCHNORM = (
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
    "test_DistributedDataParallel_SyncBatchNorm_half",
    "test_ddp_inference",
    "test_ddp_sync_bn_training_vs_eval",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    "test_sync_bn_logged",
)

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

# Not run: test_compute_bucket_assignment_by_size_sparse_error_with_logger hands the wrapper's logger to torch's C++
# code, and we have none by design; test_SyncBatchNorm_process_group needs torchvision; test_ddp_device and
# test_ddp_logging_data_gpu test the rank's GPU; test_ddp_has_finalized and test_ddp_profiling_execution_trace need
# NCCL; test_ddp_static_graph_nested_types wraps a wrapped model, which psengine refuses;
# test_DistributedDataParallel_non_default_stream does on the CPU what test_DistributedDataParallel does.
