"""All names of Headrace's telemetry. No other module contains one, which a test checks."""

from __future__ import annotations

from typing import Final

# Root span: one Generate call, from arrival to end.
SPAN_REQUEST: Final = "headrace.request"
# Chat template and tokenizer.
SPAN_TOKENIZE: Final = "headrace.tokenize"
# Selection of a decode worker.
SPAN_ROUTE: Final = "headrace.route"
# One attempt, with one transfer id; parent of both workers' spans.
SPAN_ATTEMPT: Final = "headrace.attempt"
# From the request to the decode worker to its reservation.
SPAN_RESERVE: Final = "headrace.reserve"
# From entering the prefill queue to being pulled.
SPAN_QUEUE: Final = "headrace.queue"
# From arrival to the first token.
SPAN_FIRST_TOKEN: Final = "headrace.first_token"
# From the first token to the second, where prefill made the first, or decode made it from prefill's logits.
SPAN_SECOND_TOKEN: Final = "headrace.second_token"
# From the first token to the last token, on the router.
SPAN_STREAM: Final = "headrace.stream"

# One prefill task, from being pulled to its end.
SPAN_PREFILL: Final = "headrace.prefill"
# The engine's forward passes.
SPAN_PREFILL_COMPUTE: Final = "headrace.prefill.compute"
# What one prefill rank wrote to one decode rank for one task: from the first layer being ready to the last
# acknowledgement. A failed or cancelled task has them too. headrace.link.layers has the times of each layer.
SPAN_TRANSFER_LINK: Final = "headrace.transfer.link"
# One layer's write of a link, child of its span. Only where the prefill worker's setting trace_layers is on.
SPAN_TRANSFER_LAYER: Final = "headrace.transfer.layer"

# One Generate call on the decode worker.
SPAN_DECODE: Final = "headrace.decode"
# Reservation of blocks.
SPAN_DECODE_RESERVE: Final = "headrace.decode.reserve"
# From the reservation to the arrival of the last expected key.
SPAN_DECODE_KV_WAIT: Final = "headrace.decode.kv_wait"
# One transfer, from the reservation of decode's blocks until no worker may write to them. Its states are events.
SPAN_TRANSFER: Final = "headrace.transfer"
# From complete KV to the arrival of the first token that prefill made.
SPAN_DECODE_TOKEN_WAIT: Final = "headrace.decode.token_wait"
# From the reservation to the arrival of the logits, where decode makes the first token from them.
SPAN_DECODE_LOGITS_WAIT: Final = "headrace.decode.logits_wait"
# From the arrival of the logits to the first token.
SPAN_DECODE_SAMPLE: Final = "headrace.decode.sample"
# From complete KV to the first token that decode computes. Where prefill or its logits made the first token, from
# the later of the two.
SPAN_DECODE_FIRST_TOKEN: Final = "headrace.decode.first_token"
# From the first token to the last token, on the decode worker.
SPAN_DECODE_GENERATE: Final = "headrace.decode.generate"

# A transfer entered a state.
EVENT_TRANSFER_STATE: Final = "headrace.transfer.state_entered"
# The state: "reserved", "open", "receiving", "complete", "failed", "draining" or "free".
ATTRIBUTE_TRANSFER_STATE: Final = "headrace.transfer.state"

# Id of the request, from the client or the router.
ATTRIBUTE_REQUEST_ID: Final = "headrace.request_id"
# Transfer id of an attempt.
ATTRIBUTE_TRANSFER_ID: Final = "headrace.transfer_id"
# Name of the model.
ATTRIBUTE_MODEL: Final = "headrace.model"
# Tokens of the prompt.
ATTRIBUTE_PROMPT_TOKENS: Final = "headrace.prompt_tokens"
# Tokens generated.
ATTRIBUTE_COMPLETION_TOKENS: Final = "headrace.completion_tokens"
# Tokens of the answer that earlier workers generated.
ATTRIBUTE_GENERATED_TOKENS: Final = "headrace.generated_tokens"
# "stop" or "length".
ATTRIBUTE_FINISH_REASON: Final = "headrace.finish_reason"
# Number of the attempt, from 1.
ATTRIBUTE_ATTEMPT: Final = "headrace.attempt.number"
# Source of the first token: "decode", "prefill" or "logits" (decode, from prefill's logits). With "decode", the
# transfer is within headrace.first_token. Otherwise it is within headrace.second_token.
ATTRIBUTE_FIRST_TOKEN: Final = "headrace.first_token_by"
# Location of the prefill: "remote" or "local".
ATTRIBUTE_PLACEMENT: Final = "headrace.placement"
# Reason for the selection of the decode worker.
ATTRIBUTE_EXPLANATION: Final = "headrace.explanation"
# The decode workers with the lowest costs, with these costs in tokens.
ATTRIBUTE_CANDIDATES: Final = "headrace.candidates"
# Number of prompts ahead on entering the prefill queue.
ATTRIBUTE_QUEUE_DEPTH: Final = "headrace.queue.depth"
# Reason of the error, as in headrace_common.errors.
ATTRIBUTE_ERROR_REASON: Final = "headrace.error.reason"

# Id of the prefill worker.
ATTRIBUTE_PREFILL_WORKER_ID: Final = "headrace.prefill.worker_id"
# Id of the decode worker.
ATTRIBUTE_DECODE_WORKER_ID: Final = "headrace.decode.worker_id"
# Incarnation of the process that made the span.
ATTRIBUTE_INCARNATION: Final = "headrace.incarnation"
# Prompt tokens found in a worker's prefix cache.
ATTRIBUTE_CACHED_TOKENS: Final = "headrace.cached_tokens"
# Prompt tokens with transferred KV.
ATTRIBUTE_TRANSFERRED_TOKENS: Final = "headrace.transferred_tokens"
# KV blocks reserved.
ATTRIBUTE_BLOCKS: Final = "headrace.blocks"

# Index of the layer, from 0.
ATTRIBUTE_LAYER: Final = "headrace.layer"
# Tensor-parallel rank that sent.
ATTRIBUTE_SOURCE_RANK: Final = "headrace.source_rank"
# Tensor-parallel rank that received.
ATTRIBUTE_DESTINATION_RANK: Final = "headrace.destination_rank"
# Tokens in the written range.
ATTRIBUTE_TOKENS: Final = "headrace.tokens"
# First token of the written range.
ATTRIBUTE_START_TOKEN: Final = "headrace.start_token"
# Bytes of KV transferred.
ATTRIBUTE_PAYLOAD_BYTES: Final = "headrace.payload_bytes"
# Contiguous runs in the copy plan.
ATTRIBUTE_RUNS: Final = "headrace.runs"
# Entries passed to the transport for the runs.
ATTRIBUTE_ENTRIES: Final = "headrace.entries"
# Transport of the bytes, such as "mooncake/tcp". Several are joined by "+".
ATTRIBUTE_TRANSPORT: Final = "headrace.transport"
# Strategy for short runs: "direct", "gather", "scatter" or "gather_scatter". Several are joined by "+".
ATTRIBUTE_STRATEGY: Final = "headrace.strategy"
# Bytes of the handoff messages about a transfer, in both directions.
ATTRIBUTE_CONTROL_BYTES: Final = "headrace.control_bytes"
# Milliseconds from a layer being ready to the start of its write.
ATTRIBUTE_SEND_WAIT_MS: Final = "headrace.send_wait_ms"
# Number of expected keys (source rank, destination rank, layer).
ATTRIBUTE_EXPECTED_KEYS: Final = "headrace.expected_keys"
# Layer writes of a link, one for each layer and chunk of the prompt.
ATTRIBUTE_WRITES: Final = "headrace.link.writes"
# The times of a link's last 512 layer writes, packed: headrace_common.telemetry.layer_stamps decodes them. They count
# from the start of the link's span.
ATTRIBUTE_LINK_LAYERS: Final = "headrace.link.layers"
# Host of the receiving rank's memory.
ATTRIBUTE_DESTINATION_HOST: Final = "headrace.link.destination_host"
# Host of the sending rank's memory.
ATTRIBUTE_SOURCE_HOST: Final = "headrace.link.source_host"
# Memory that the rank sent from: "host", "device" (adapters read it) or "device_staged" (copied to host memory first).
ATTRIBUTE_LINK_MEMORY: Final = "headrace.link.memory"
# "same_host" or "network".
ATTRIBUTE_LINK_KIND: Final = "headrace.link.kind"
# Milliseconds in which bytes of a link were on the way. Overlapping writes count once.
ATTRIBUTE_MOVING_MS: Final = "headrace.link.moving_ms"
# Bytes of a link by the seconds in which they were on the way, in 10^9 bytes per second.
ATTRIBUTE_GIGABYTES_PER_S: Final = "headrace.link.gb_per_s"
# Layer of the write that landed last on a link.
ATTRIBUTE_LAST_LAYER: Final = "headrace.link.last_layer"
# What most of the time of that write went to, see headrace_common.telemetry.layer_stamps.Cause.
ATTRIBUTE_LAST_CAUSE: Final = "headrace.link.last_cause"
# Milliseconds of that cause.
ATTRIBUTE_LAST_CAUSE_MS: Final = "headrace.link.last_cause_ms"
# Bandwidth with which a link is compared, in 10^9 bits per second.
ATTRIBUTE_BANDWIDTH_GBIT_PER_S: Final = "headrace.link.bandwidth_gbit_per_s"
# Where that bandwidth is from: "setting", or "measured": this worker's best link to that host by that transport.
ATTRIBUTE_BANDWIDTH_FROM: Final = "headrace.link.bandwidth_from"
# Milliseconds in which the bytes should have moved: bytes / (0.9 * bandwidth).
ATTRIBUTE_EXPECTED_MS: Final = "headrace.link.expected_ms"
# Share of the bandwidth with which the bytes moved, such as 0.31.
ATTRIBUTE_BANDWIDTH_SHARE: Final = "headrace.link.bandwidth_share"
# The link of a task that landed last, such as "prefill-1/r2 -> decode-0/r1".
ATTRIBUTE_LAST_LINK: Final = "headrace.transfer.last_link"
# Milliseconds from a task's first layer being ready to the landing of its last write. headrace.exposed_ms is the part
# of them after the last layer was ready.
ATTRIBUTE_TRANSFER_MS: Final = "headrace.transfer.ms"
# Milliseconds from prefill's last layer being ready to the landing of the last write.
ATTRIBUTE_EXPOSED_MS: Final = "headrace.exposed_ms"
# Bytes of KV that decode ranks copied to each other.
ATTRIBUTE_LOCAL_BYTES: Final = "headrace.local_bytes"

# Microseconds of each part of the time to the first token, on the root span; of the time to the second token, on
# headrace.second_token. Parts without time are left out, and those of one span add up to headrace.latency.total_us.
# latency.proto describes the parts.
ATTRIBUTE_LATENCY_TOTAL_US: Final = "headrace.latency.total_us"
# The router's waits before its choice of workers.
ATTRIBUTE_LATENCY_ADMISSION_US: Final = "headrace.latency.admission_us"
# Chat template, tokenizer and validation.
ATTRIBUTE_LATENCY_TOKENIZE_US: Final = "headrace.latency.tokenize_us"
# Choice of the workers.
ATTRIBUTE_LATENCY_ROUTE_US: Final = "headrace.latency.route_us"
# Attempts that failed, with the pauses after them.
ATTRIBUTE_LATENCY_RETRY_US: Final = "headrace.latency.retry_us"
# The request to the decode worker, to its reservation.
ATTRIBUTE_LATENCY_RESERVE_US: Final = "headrace.latency.reserve_us"
# The prefill queue.
ATTRIBUTE_LATENCY_QUEUE_US: Final = "headrace.latency.queue_us"
# The prefill worker's wait for its first forward pass with the task.
ATTRIBUTE_LATENCY_BATCH_WAIT_US: Final = "headrace.latency.batch_wait_us"
# Forward passes over the prompt.
ATTRIBUTE_LATENCY_PREFILL_US: Final = "headrace.latency.prefill_us"
# The part of the transfer that computing does not hide.
ATTRIBUTE_LATENCY_TRANSFER_EXPOSED_US: Final = "headrace.latency.transfer_exposed_us"
# The decode worker's wait for its first step with the request.
ATTRIBUTE_LATENCY_DECODE_WAIT_US: Final = "headrace.latency.decode_wait_us"
# The decode worker's step that makes the token.
ATTRIBUTE_LATENCY_FIRST_STEP_US: Final = "headrace.latency.first_step_us"
# Messages between the processes, and the pacing of the stream.
ATTRIBUTE_LATENCY_NETWORK_US: Final = "headrace.latency.network_us"
# The rest, which no measured step explains.
ATTRIBUTE_LATENCY_UNACCOUNTED_US: Final = "headrace.latency.unaccounted_us"
# Microseconds of the transfer beside prefill's computation, on the root span.
ATTRIBUTE_TRANSFER_HIDDEN_US: Final = "headrace.latency.transfer_hidden_us"
# The token that waits for the exposed transfer: "first_token" or "second_token", on the root span.
ATTRIBUTE_TRANSFER_OWNER: Final = "headrace.transfer.owner"
# Milliseconds of the exposed transfer in the owner's time, on the root span.
ATTRIBUTE_TRANSFER_EXPOSED_MS: Final = "headrace.transfer.exposed_ms"
# Milliseconds by which a worker's clock is ahead of the router's. The router's trace store adds it to a worker's spans,
# and moves them to its own clock.
ATTRIBUTE_CLOCK_AHEAD_MS: Final = "headrace.clock.ahead_ms"
# Bound on the error of that offset in milliseconds; on the root span, on the error of borders between hosts.
ATTRIBUTE_CLOCK_ERROR_MS: Final = "headrace.clock.error_ms"

# Queue of a metric: "prefill" (tasks), "prefill tokens", "requests" (admitted), "waiting" (for admission) or "tokens"
# (of prompts without a first token).
ATTRIBUTE_QUEUE: Final = "headrace.queue.name"
# Worker of a metric. A process may have several workers.
ATTRIBUTE_WORKER_ID: Final = "headrace.worker_id"
# Part of a ticket that was refused: "missing", "signature", "key_id", "expiry", "request_hash" or another claim.
ATTRIBUTE_TICKET_PART: Final = "headrace.ticket.part"
# State of the requests that a metric counts: "running" or "waiting".
ATTRIBUTE_WORKER_STATE: Final = "headrace.worker.state"
# End of a request or transfer: "done", its finish reason, or the reason of its error.
ATTRIBUTE_END_REASON: Final = "headrace.end_reason"
# What a client listener refused or closed: "calls in flight" (of one caller), "rejected calls" (too many of one
# caller), "late request", "removed key", "surplus connection" or "blocked host" (a connection of one).
ATTRIBUTE_REFUSAL: Final = "headrace.refusal"
# Bound of the router's trace store: "span" (bytes of one span), "trace" (spans or bytes of one trace) or "store" (bytes
# of all traces).
ATTRIBUTE_TRACE_BOUND: Final = "headrace.trace.bound"

# Items in a bounded queue, by queue name.
METRIC_QUEUE_DEPTH: Final = "headrace.queue.depth.current"
# Limit of a queue, by queue name: "prefill", "requests" or "tokens".
METRIC_QUEUE_LIMIT: Final = "headrace.queue.limit"
# Age of the oldest task in the prefill queue.
METRIC_QUEUE_AGE_MS: Final = "headrace.queue.oldest_age_ms"
# Expected wait of a new task in the prefill queue. Not recorded while the queue is full.
METRIC_QUEUE_WAIT_MS: Final = "headrace.queue.wait_ms"
# Requests ended, by finish reason or error reason.
METRIC_REQUESTS: Final = "headrace.requests"
# Answers that continued in another attempt, by the reason of the error that caused it.
METRIC_MIGRATIONS: Final = "headrace.migrations"
# Time from arrival to the first token.
METRIC_TIME_TO_FIRST_TOKEN_MS: Final = "headrace.time_to_first_token_ms"
# Workers without credit for cached prefixes, because they hash prefixes differently from the router.
METRIC_PREFIX_FAULTS: Final = "headrace.prefix.faulty_workers"
# How far the wall clock of a decode worker is ahead of the router's, by worker; negative when it is behind.
METRIC_CLOCK_OFFSET_MS: Final = "headrace.clock.offset_ms"
# Calls that a client listener refused and connections that it closed, beyond the bounds on each caller, by refusal.
METRIC_CALLERS_REFUSED: Final = "headrace.callers.refused"
# Tickets that a decode worker refused, by worker and by part of the ticket.
METRIC_TICKET_REFUSALS: Final = "headrace.tickets.refused"
# Spans that the router's trace store dropped, by the bound that they exceeded.
METRIC_TRACE_SPANS_DROPPED: Final = "headrace.trace.dropped_spans"
# Records in etcd that the registry skips, because it cannot read them.
METRIC_CORRUPT_RECORDS: Final = "headrace.registry.corrupt_records"
# Transfers ended, by outcome.
METRIC_TRANSFERS: Final = "headrace.transfers"
# Bytes of KV transferred.
METRIC_TRANSFER_BYTES: Final = "headrace.transfer.bytes"
# Transfers of a worker in progress.
METRIC_TRANSFERS_ACTIVE: Final = "headrace.transfers.active"
# Requests or tasks on a worker, by headrace.worker.state.
METRIC_WORKER_REQUESTS: Final = "headrace.worker.requests"
# KV blocks of a decode worker in total.
METRIC_BLOCKS_TOTAL: Final = "headrace.blocks.total"
# KV blocks neither reserved nor quarantined.
METRIC_BLOCKS_FREE: Final = "headrace.blocks.free"
# KV blocks with KV of requests, as counted by the worker's engine.
METRIC_BLOCKS_USED: Final = "headrace.blocks.used"
# KV blocks reserved for requests.
METRIC_BLOCKS_RESERVED: Final = "headrace.blocks.reserved"
# KV blocks that must not be reused yet.
METRIC_BLOCKS_QUARANTINED: Final = "headrace.blocks.quarantined"
