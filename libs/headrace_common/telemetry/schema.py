"""Every name that Headrace's telemetry uses. Nothing else spells one: a test checks it."""

from __future__ import annotations

from typing import Final

# Root: one Generate call, from arrival to its end.
SPAN_REQUEST: Final = "headrace.request"
# Chat template and tokenizer.
SPAN_TOKENIZE: Final = "headrace.tokenize"
# Choice of a decode worker.
SPAN_ROUTE: Final = "headrace.route"
# One try, with one transfer id; parent of both workers' spans.
SPAN_ATTEMPT: Final = "headrace.attempt"
# From asking the decode worker to its reservation.
SPAN_RESERVE: Final = "headrace.reserve"
# From joining the prefill queue to being pulled.
SPAN_QUEUE: Final = "headrace.queue"
# From arrival to the first token.
SPAN_FIRST_TOKEN: Final = "headrace.first_token"
# From the first token, when prefill made it or decode from prefill's logits, to the second.
SPAN_SECOND_TOKEN: Final = "headrace.second_token"
# From the first token to the last.
SPAN_STREAM: Final = "headrace.stream"

# One task, from being pulled to its end.
SPAN_PREFILL: Final = "headrace.prefill"
# The engine's forward passes.
SPAN_PREFILL_COMPUTE: Final = "headrace.prefill.compute"
# One layer's write to one decode rank.
SPAN_TRANSFER_LAYER: Final = "headrace.transfer.layer"

# One Generate call on the decode worker.
SPAN_DECODE: Final = "headrace.decode"
# Reservation of blocks.
SPAN_DECODE_RESERVE: Final = "headrace.decode.reserve"
# From the reservation to the last expected key.
SPAN_DECODE_KV_WAIT: Final = "headrace.decode.kv_wait"
# One transfer into decode's blocks, from their reservation until nobody may write into them; its states are events.
SPAN_TRANSFER: Final = "headrace.transfer"
# From complete KV to hearing the first token that prefill made.
SPAN_DECODE_TOKEN_WAIT: Final = "headrace.decode.token_wait"
# From the reservation to complete logits, where decode makes the first token from them.
SPAN_DECODE_LOGITS_WAIT: Final = "headrace.decode.logits_wait"
# From there to that token.
SPAN_DECODE_SAMPLE: Final = "headrace.decode.sample"
# From complete KV, and the first token where prefill or its logits made it, to the first token that decode computes.
SPAN_DECODE_FIRST_TOKEN: Final = "headrace.decode.first_token"
# From the first token to the last.
SPAN_DECODE_GENERATE: Final = "headrace.decode.generate"

# A transfer has entered a state.
EVENT_TRANSFER_STATE: Final = "headrace.transfer.state_entered"
# The state: "reserved", "open", "receiving", "complete", "failed", "draining" or "free".
ATTRIBUTE_TRANSFER_STATE: Final = "headrace.transfer.state"

# The client's or the router's name for the request.
ATTRIBUTE_REQUEST_ID: Final = "headrace.request_id"
# The transfer of an attempt.
ATTRIBUTE_TRANSFER_ID: Final = "headrace.transfer_id"
# Name of the model.
ATTRIBUTE_MODEL: Final = "headrace.model"
# Tokens of the prompt.
ATTRIBUTE_PROMPT_TOKENS: Final = "headrace.prompt_tokens"
# Tokens generated.
ATTRIBUTE_COMPLETION_TOKENS: Final = "headrace.completion_tokens"
# Tokens of the answer that others had generated before.
ATTRIBUTE_GENERATED_TOKENS: Final = "headrace.generated_tokens"
# "stop" or "length".
ATTRIBUTE_FINISH_REASON: Final = "headrace.finish_reason"
# Which try this is, from 1.
ATTRIBUTE_ATTEMPT: Final = "headrace.attempt.number"
# What made the first token: "decode" from the KV cache, so that the transfer lies within headrace.first_token; or
# "prefill", or "logits" (decode, from prefill's logits), and the transfer lies within headrace.second_token.
ATTRIBUTE_FIRST_TOKEN: Final = "headrace.first_token_by"
# Where the prompt is prefilled: "remote" or "local".
ATTRIBUTE_PLACEMENT: Final = "headrace.placement"
# Why a decode worker was chosen.
ATTRIBUTE_EXPLANATION: Final = "headrace.explanation"
# The decode workers that were cheapest, with their costs in tokens.
ATTRIBUTE_CANDIDATES: Final = "headrace.candidates"
# Prompts ahead on joining the prefill queue.
ATTRIBUTE_QUEUE_DEPTH: Final = "headrace.queue.depth"
# Reason from the error tree.
ATTRIBUTE_ERROR_REASON: Final = "headrace.error.reason"

# Worker that prefilled.
ATTRIBUTE_PREFILL_WORKER_ID: Final = "headrace.prefill.worker_id"
# Worker that decoded.
ATTRIBUTE_DECODE_WORKER_ID: Final = "headrace.decode.worker_id"
# Incarnation of the process that made the span.
ATTRIBUTE_INCARNATION: Final = "headrace.incarnation"
# Prompt tokens that a worker's prefix cache held.
ATTRIBUTE_CACHED_TOKENS: Final = "headrace.cached_tokens"
# Prompt tokens whose KV was transferred.
ATTRIBUTE_TRANSFERRED_TOKENS: Final = "headrace.transferred_tokens"
# KV blocks reserved.
ATTRIBUTE_BLOCKS: Final = "headrace.blocks"

# Layer, from 0.
ATTRIBUTE_LAYER: Final = "headrace.layer"
# Tensor-parallel rank that sent.
ATTRIBUTE_SOURCE_RANK: Final = "headrace.source_rank"
# Tensor-parallel rank that received.
ATTRIBUTE_DESTINATION_RANK: Final = "headrace.destination_rank"
# Tokens in the piece.
ATTRIBUTE_TOKENS: Final = "headrace.tokens"
# First token of the piece.
ATTRIBUTE_START_TOKEN: Final = "headrace.start_token"
# Bytes of KV moved.
ATTRIBUTE_PAYLOAD_BYTES: Final = "headrace.payload_bytes"
# Contiguous runs planned.
ATTRIBUTE_RUNS: Final = "headrace.runs"
# Entries that the transport was given for the runs.
ATTRIBUTE_ENTRIES: Final = "headrace.entries"
# Transport that carried the bytes, e.g. "mooncake/tcp"; several are joined by "+".
ATTRIBUTE_TRANSPORT: Final = "headrace.transport"
# How short runs got across: "direct", "gather", "scatter" or "gather_scatter"; several are joined by "+".
ATTRIBUTE_STRATEGY: Final = "headrace.strategy"
# Bytes of the handoff streams' messages about a transfer, both ways.
ATTRIBUTE_CONTROL_BYTES: Final = "headrace.control_bytes"
# Milliseconds from ready to the write's start.
ATTRIBUTE_SEND_WAIT_MS: Final = "headrace.send_wait_ms"
# Keys (source rank, destination rank, layer) to count.
ATTRIBUTE_EXPECTED_KEYS: Final = "headrace.expected_keys"
# Milliseconds from prefill's last layer being ready to its arrival.
ATTRIBUTE_EXPOSED_MS: Final = "headrace.exposed_ms"
# Bytes of KV that decode's ranks passed on to each other.
ATTRIBUTE_LOCAL_BYTES: Final = "headrace.local_bytes"

# Which queue a metric is of: "prefill" (tasks), "prefill tokens", "requests" (let in), "waiting" (to be let in) or
# "tokens" (of prompts without a first token).
ATTRIBUTE_QUEUE: Final = "headrace.queue.name"
# Which worker a metric is of: a process may host many.
ATTRIBUTE_WORKER_ID: Final = "headrace.worker_id"
# What becomes of the requests that a metric counts: "running" or "waiting".
ATTRIBUTE_WORKER_STATE: Final = "headrace.worker.state"
# How a request or a transfer ended: "done", its finish reason, or its error's reason.
ATTRIBUTE_END_REASON: Final = "headrace.end_reason"

# Items in a bounded queue, by its name.
METRIC_QUEUE_DEPTH: Final = "headrace.queue.depth.current"
# What a queue refuses to hold more than, by its name: of "prefill", "requests" and "tokens".
METRIC_QUEUE_LIMIT: Final = "headrace.queue.limit"
# How long the oldest task has waited in the prefill queue.
METRIC_QUEUE_AGE_MS: Final = "headrace.queue.oldest_age_ms"
# How long a task that came now would wait in the prefill queue; not told while it is full.
METRIC_QUEUE_WAIT_MS: Final = "headrace.queue.wait_ms"
# Requests ended, by finish reason or error reason.
METRIC_REQUESTS: Final = "headrace.requests"
# Answers that went on at another decode worker, or another attempt, by the reason why they had to.
METRIC_MIGRATIONS: Final = "headrace.migrations"
# Arrival to first token.
METRIC_TIME_TO_FIRST_TOKEN_MS: Final = "headrace.time_to_first_token_ms"
# Workers whose caches cannot count, because they hash prefixes otherwise than the router.
METRIC_PREFIX_FAULTS: Final = "headrace.prefix.faulty_workers"
# Transfers ended, by outcome.
METRIC_TRANSFERS: Final = "headrace.transfers"
# Bytes of KV handed over.
METRIC_TRANSFER_BYTES: Final = "headrace.transfer.bytes"
# Transfers that a worker has begun and not ended.
METRIC_TRANSFERS_ACTIVE: Final = "headrace.transfers.active"
# Requests on a worker, or tasks, by what becomes of them: see headrace.worker.state.
METRIC_WORKER_REQUESTS: Final = "headrace.worker.requests"
# KV blocks of a decode worker in all.
METRIC_BLOCKS_TOTAL: Final = "headrace.blocks.total"
# KV blocks neither promised nor kept from reuse.
METRIC_BLOCKS_FREE: Final = "headrace.blocks.free"
# KV blocks of any worker that hold requests' KV, by its engine's own count.
METRIC_BLOCKS_USED: Final = "headrace.blocks.used"
# KV blocks promised to requests.
METRIC_BLOCKS_RESERVED: Final = "headrace.blocks.reserved"
# KV blocks not to be reused yet.
METRIC_BLOCKS_QUARANTINED: Final = "headrace.blocks.quarantined"
