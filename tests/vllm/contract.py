"""What Headrace uses of vLLM by name: hooks, calls, fields and variables."""

from __future__ import annotations

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
BASE = f"{CONNECTORS}.base"
OUTPUT = "vllm.v1.core.sched.output"
CACHES = "vllm.v1.kv_cache_interface"
EVENTS = "vllm.distributed.kv_events"
COMMUNICATOR = "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator"

# Hooks that vLLM calls on our connector, with the parameters that ours take in their order.
HOOKS = {
    "__init__": ("vllm_config", "role", "kv_cache_config"),
    "bind_connector_metadata": ("connector_metadata",),
    "bind_kv_cache_manager": ("kv_cache_manager",),
    "build_connector_meta": ("scheduler_output",),
    "build_connector_worker_meta": (),
    "get_loaded_kv_cache_group_ids": ("request",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "get_required_kvcache_layout": ("vllm_config",),
    "get_transfer_results": ("finished_req_ids",),
    "handle_preemptions": ("kv_connector_metadata",),
    "has_pending_push_work": (),
    "on_new_request": ("request",),
    "register_kv_caches": ("kv_caches",),
    "request_finished": ("request", "block_ids"),
    "requires_piecewise_for_cudagraph": ("extra_config",),
    "reset_cache": (),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "shutdown": (),
    "take_events": (),
    "start_load_kv": ("forward_context", "kwargs"),
    "update_connector_output": ("connector_output",),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "wait_for_layer_load": ("layer_name",),
    "wait_for_save": (),
}

PROPERTIES = ("supports_divergent_local_hybrid_hits",)

# Functions and methods that we call, with the parameters that we give them.
CALLS = {
    f"{BASE}.SupportsHMA.request_finished_all_groups": "request block_ids",
    "vllm.v1.engine.async_llm.AsyncLLM.from_vllm_config": "vllm_config disable_log_stats",
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor": "vllm_config monitor_workers",
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor.shutdown": "",
    "vllm.v1.engine.async_llm.AsyncLLM.generate": "prompt sampling_params request_id lora_request",
    "vllm.v1.engine.async_llm.AsyncLLM.add_request": "request_id prompt params lora_request",
    "vllm.v1.engine.async_llm.AsyncLLM.abort": "request_id internal",
    "vllm.v1.engine.output_processor.RequestOutputCollector.put": "output",
    "vllm.v1.engine.output_processor.OutputProcessor.process_outputs": "engine_core_outputs",
    "vllm.v1.engine.async_llm.AsyncLLM.add_lora": "lora_request",
    "vllm.renderers.base.BaseRenderer.render_cmpl_async": "prompts skip_mm_cache",
    "vllm.multimodal.media.image.ImageMediaIO.load_bytes": "data",
    "vllm.multimodal.utils.strip_covered_mm_data": "mm_features num_computed_tokens",
    "vllm.lora.request.LoRARequest": "lora_name lora_int_id lora_path is_3d_lora_weight",
    "vllm.v1.engine.async_llm.AsyncLLM.reset_prefix_cache": "reset_connector",
    "vllm.v1.engine.async_llm.AsyncLLM.shutdown": "",
    "vllm.engine.arg_utils.AsyncEngineArgs.create_engine_config": "",
    "vllm.config.model.ModelConfig.get_total_num_kv_heads": "",
    "vllm.model_executor.layers.mamba.mamba_utils.is_conv_state_dim_first": "",
    "vllm.distributed.utils.get_pp_indices": "num_hidden_layers pp_rank pp_size",
    "vllm.distributed.parallel_state.get_pp_group": "",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.sync_and_gather_intermediate_tensors": (
        "num_tokens intermediate_tensors sync_self"
    ),
    "vllm.config.model.ModelConfig.get_total_num_hidden_layers": "",
    "vllm.config.speculative.SpeculativeConfig.uses_draft_kv_cache": "",
    "vllm.v1.core.block_pool.BlockPool.get_cached_block": "block_hash kv_cache_group_ids",
    "vllm.v1.core.block_pool.BlockPool.get_new_blocks": "num_blocks",
    "vllm.v1.core.block_pool.BlockPool.get_num_free_blocks": "",
    "vllm.v1.core.block_pool.BlockPool.touch": "blocks",
    "vllm.v1.core.block_pool.BlockPool.free_blocks": "ordered_blocks",
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks.get_block_ids": "",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_block_ids": "request_id",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.evict_blocks": "block_ids",
    "vllm.v1.core.kv_cache_utils.get_block_hash": "key",
    "vllm.v1.core.kv_cache_utils.maybe_convert_block_hash": "hash_bytes",
    "vllm.v1.request.Request.append_output_token_ids": "token_ids",
    "vllm.sampling_params.SamplingParams.verify": (
        "model_config speculative_config structured_outputs_config tokenizer"
    ),
    "vllm.v1.request.Request": "request_id prompt_token_ids sampling_params pooling_params",
    "vllm.v1.structured_output.StructuredOutputManager": "vllm_config",
    "vllm.v1.structured_output.StructuredOutputManager.clear_backend": "",
    "vllm.v1.structured_output.StructuredOutputManager.grammar_bitmask": (
        "requests structured_output_request_ids scheduled_spec_decode_tokens"
    ),
    "vllm.v1.structured_output.StructuredOutputManager.grammar_init": "request",
    "vllm.v1.structured_output.StructuredOutputManager._create_grammar": "request",
    "vllm.v1.structured_output.backend_types.StructuredOutputGrammar.accept_tokens": (
        "request_id tokens"
    ),
    "vllm.v1.structured_output.backend_types.StructuredOutputGrammar.fill_bitmask": "bitmask batch_index",
    "vllm.v1.structured_output.backend_types.StructuredOutputGrammar.validate_tokens": "tokens",
    "vllm.v1.structured_output.backend_types.StructuredOutputGrammar.rollback": "num_tokens",
    "vllm.v1.structured_output.backend_types.StructuredOutputGrammar.reset": "",
    "vllm.v1.structured_output.backend_types.StructuredOutputGrammar.is_terminated": "",
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler": "use_fp64_gumbel",
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_native": "logits generators k p",
    "vllm.v1.worker.gpu_input_batch.InputBatch.add_request": "request",
    "vllm.v1.worker.gpu_input_batch.InputBatch.remove_request": "req_id",
    "vllm.v1.worker.gpu_input_batch.InputBatch.condense": "",
    "vllm.v1.worker.gpu_input_batch.InputBatch.refresh_metadata": "",
    "vllm.v1.worker.gpu_input_batch.InputBatch": (
        "max_num_reqs max_model_len max_num_batched_tokens device vocab_size block_sizes "
        "max_num_blocks_per_req logitsprocs"
    ),
    "vllm.v1.worker.gpu_input_batch.CachedRequestState": (
        "req_id prompt_token_ids mm_features sampling_params generator block_ids "
        "num_computed_tokens output_token_ids"
    ),
    "vllm.v1.sample.sampler.Sampler.forward": "logits sampling_metadata",
    "vllm.v1.sample.logits_processor.build_logitsprocs": (
        "vllm_config device is_pin_memory is_pooling_model"
    ),
    "vllm.v1.engine.async_llm.AsyncLLM.collective_rpc": "method args",
    "vllm.distributed.parallel_state.get_world_group": "",
    "vllm.model_executor.layers.logits_processor.LogitsProcessor._apply_head": (
        "lm_head hidden_states embedding_bias"
    ),
    "vllm.v1.worker.lora_model_runner_mixin.LoRAModelRunnerMixin._set_active_loras": (
        "prompt_lora_mapping token_lora_mapping lora_requests"
    ),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.get_model": "",
    "vllm.config.model.ModelConfig.get_hidden_size": "",
    "vllm.config.model.ModelConfig.get_vocab_size": "",
    "vllm.distributed.parallel_state.get_tensor_model_parallel_rank": "",
    "vllm.model_executor.models.utils.extract_layer_index": "layer_name",
    "vllm.v1.attention.backends.cpu_attn._get_attn_isa": "dtype block_size head_size",
    "vllm.platforms.interface.Platform.is_cpu": "",
}

# Classes, with the fields that we read or set.
FIELDS = {
    f"{BASE}.KVConnectorTransferResults": "finished_sending finished_recving failed_recving",
    f"{BASE}.KVConnectorMetadata": "",
    "vllm.v1.outputs.KVConnectorOutput": "finished_recving",
    f"{BASE}.KVConnectorRole": "SCHEDULER WORKER",
    f"{OUTPUT}.SchedulerOutput": (
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens preempted_req_ids "
        "scheduled_spec_decode_tokens"
    ),
    f"{OUTPUT}.NewRequestData": "req_id num_computed_tokens block_ids",
    f"{OUTPUT}.CachedRequestData": "req_ids resumed_req_ids num_computed_tokens new_block_ids",
    "vllm.v1.core.block_pool.BlockPool": "num_gpu_blocks blocks",
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": "block_id is_null block_hash",
    "vllm.v1.core.kv_cache_manager.KVCacheManager": "block_pool kv_cache_config",
    "vllm.v1.request.Request": (
        "request_id kv_transfer_params num_prompt_tokens num_computed_tokens num_tokens "
        "block_hashes "
        "prompt_token_ids prompt_embeds lora_request mm_features status sampling_params "
        "structured_output_request prefill_stats num_output_placeholders"
    ),
    "vllm.v1.worker.gpu_input_batch.CachedRequestState": (
        "sampling_params output_token_ids generator"
    ),
    "vllm.v1.worker.gpu_input_batch.InputBatch": "vocab_size sampling_metadata req_ids",
    "vllm.v1.outputs.SamplerOutput": "sampled_token_ids logprobs_tensors",
    "vllm.model_executor.layers.linear.UnquantizedLinearMethod": "",
    "vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod": "",
    "vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding": "quant_method",
    "vllm.v1.outputs.LogprobsTensors": "logprob_token_ids logprobs",
    "vllm.sampling_params.SamplingType": "RANDOM_SEED",
    "vllm.v1.request.RequestStatus": "FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_ERROR",
    "vllm.lora.request.LoRARequest": "lora_name lora_path",
    "vllm.entrypoints.openai.models.protocol.LoRAModulePath": "name path is_3d_lora_weight",
    "vllm.multimodal.inputs.MultiModalFeatureSpec": "identifier",
    "vllm.multimodal.inputs.PlaceholderRange": "offset length",
    "vllm.config.multimodal.MultiModalConfig": "media_io_kwargs",
    f"{CACHES}.KVCacheConfig": "kv_cache_groups",
    f"{CACHES}.KVCacheGroupSpec": "layer_names kv_cache_spec",
    f"{CACHES}.KVCacheSpec": "block_size page_size_bytes",
    f"{CACHES}.FullAttentionSpec": "",
    f"{CACHES}.MLAAttentionSpec": "",
    f"{CACHES}.MambaSpec": "dtypes mamba_type shapes tp_replicated",
    f"{CACHES}.UniformTypeKVCacheSpecs": "kv_cache_specs",
    f"{CACHES}.KVCacheSpecKind": "FULL_ATTENTION MLA_ATTENTION MAMBA",
    # vLLM's own offloading, beside our connector.
    f"{CONNECTORS}.multi_connector.MultiConnector": "_connectors",
    f"{CONNECTORS}.multi_connector.MultiKVConnectorMetadata": "metadata",
    f"{CONNECTORS}.multi_connector.MultiKVConnectorWorkerMetadata": "metadata",
    f"{CONNECTORS}.offloading.common.OffloadingConnectorMetadata": "store_jobs",
    f"{CONNECTORS}.offloading.common.TransferJob": "src_spec",
    f"{CONNECTORS}.offloading.common.OffloadingWorkerMetadata": "completed_jobs",
    "vllm.v1.kv_offload.base.BlockIDsLoadStoreSpec": "block_ids",
    # The steps that vLLM plans before it handles the results of the first.
    "vllm.config.VllmConfig": (
        "model_config parallel_config scheduler_config kv_transfer_config max_concurrent_batches "
        "speculative_config"
    ),
    "vllm.config.speculative.SpeculativeConfig": "draft_model_config",
    "vllm.distributed.parallel_state.GroupCoordinator": "cpu_group rank_in_group world_size",
    # With several steps under way, vLLM keeps back the blocks of a request that one still writes to.
    "vllm.v1.core.sched.scheduler.Scheduler": "defer_block_free",
    "vllm.config.ModelConfig": (
        "max_model_len model dtype hf_config hf_text_config use_fp64_gumbel "
        "multimodal_config supports_multimodal_inputs"
    ),
    "vllm.config.ParallelConfig": (
        "tensor_parallel_size data_parallel_size pipeline_parallel_size data_parallel_rank "
        "data_parallel_master_ip data_parallel_rpc_port nnodes node_rank"
    ),
    # Ranks of another host's engine.
    "vllm.v1.executor.multiproc_executor.WorkerProcHandle": "proc",
    # Data-parallel ranks.
    "vllm.v1.engine.core_client.MPClient": "resources",
    "vllm.v1.engine.core_client.BackgroundResources": "engine_manager coordinator",
    "vllm.v1.engine.utils.CoreEngineProcManager": "processes",
    "vllm.v1.engine.coordinator.DPCoordinator": "proc",
    COMMUNICATOR: "cpu_group rank_in_group world_size",
    "vllm.config.SchedulerConfig": "async_scheduling scheduler_cls",
    "vllm.config.KVEventsConfig": "enable_kv_cache_events publisher endpoint replay_endpoint hwm topic",
    "vllm.config.KVTransferConfig": (
        "kv_connector kv_connector_module_path kv_role engine_id kv_load_failure_policy "
        "kv_connector_extra_config"
    ),
    "vllm.v1.engine.async_llm.AsyncLLM": (
        "vllm_config output_handler engine_core model_config renderer"
    ),
    "vllm.engine.arg_utils.AsyncEngineArgs": (
        "model dtype seed max_model_len tensor_parallel_size pipeline_parallel_size block_size "
        "num_gpu_blocks_override max_num_seqs max_num_batched_tokens enable_prefix_caching "
        "speculative_config "
        "kv_events_config enable_chunked_prefill limit_mm_per_prompt enforce_eager kv_cache_memory_bytes "
        "gpu_memory_utilization async_scheduling skip_tokenizer_init generation_config "
        "disable_log_stats use_tqdm_on_load worker_extension_cls kv_transfer_config"
    ),
    "vllm.sampling_params.SamplingParams": (
        "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty "
        "seed max_tokens stop_token_ids ignore_eos logprobs min_tokens logit_bias "
        "allowed_token_ids structured_outputs _bad_words_token_ids detokenize output_kind "
        "extra_args sampling_type prompt_logprobs"
    ),
    "vllm.sampling_params.RequestOutputKind": "DELTA",
    "vllm.sampling_params.StructuredOutputsParams": (
        "json regex choice grammar json_object structural_tag"
    ),
    "vllm.v1.structured_output.request.StructuredOutputRequest": "_grammar grammar",
    "vllm.v1.structured_output.StructuredOutputManager": "tokenizer",
    "vllm.exceptions.VLLMClientError": "",
    "vllm.config.model.ModelConfig": "use_mla is_moe",
    "vllm.v1.kv_cache_layout.KVCacheLayout": "LBHNC",
    "vllm.outputs.RequestOutput": (
        "outputs finished kv_transfer_params num_cached_tokens prompt_logprobs"
    ),
    "vllm.outputs.CompletionOutput": "token_ids finish_reason logprobs",
    "vllm.logprobs.Logprob": "logprob rank",
    # Read from the wire, by their names there.
    f"{EVENTS}.EventBatch": "ts events",
    f"{EVENTS}.BlockStored": (
        "block_hashes parent_block_hash token_ids block_size extra_keys group_idx "
        "kv_cache_spec_kind medium lora_id lora_name"
    ),
    f"{EVENTS}.BlockRemoved": "block_hashes group_idx medium",
    f"{EVENTS}.AllBlocksCleared": "",
}

# Hooks that not all supported versions have.
LATER_HOOKS = {"supports_sleep_mode": ("kv_transfer_config",)}

ENVIRONMENT = (
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_HOST_IP",
    "VLLM_LOGGING_LEVEL",
    "VLLM_NO_USAGE_STATS",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_WORKER_MULTIPROC_METHOD",
)
