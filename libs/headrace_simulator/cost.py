"""How long a worker takes, from its profile. Pure."""

from __future__ import annotations

from headrace_planner.settings import WorkerProfile


class CostModel:
    """Times of computing, loading and transferring."""

    def __init__(self, profile: WorkerProfile) -> None:
        self._profile = profile
        self.kv_tokens = profile.kv_tokens
        """Tokens that the KV memory of a worker holds."""
        self.max_num_seqs = profile.max_num_seqs
        """Most requests of a decode worker."""

    def prefill_s(self, prompt_tokens: int, cached_tokens: int) -> float:
        """Time to compute a prompt after its cached tokens.

        With a cached part, it is the difference of both lengths, and at least the time of a prompt of the missing
        length.
        """
        missing_s = self._whole_s(max(1, prompt_tokens - cached_tokens))
        if not cached_tokens:
            return missing_s
        return max(missing_s, self._whole_s(prompt_tokens) - self._whole_s(cached_tokens))

    def _whole_s(self, prompt_tokens: float) -> float:
        """The profile's time to first token without the step that makes the token, which is at most half of it."""
        ttft_s = self._profile.ttft_s(prompt_tokens)
        return max(ttft_s / 2, ttft_s - self._profile.step_s(1, prompt_tokens))

    def exposed_transfer_s(self, tokens: int, compute_s: float) -> float:
        """Time that the KV cache of these tokens arrives after the end of their computing.

        Layers are sent while later ones are computed, so only what exceeds the time of computing counts.
        """
        transfer = self._profile.transfer
        if not tokens:
            return 0.0
        return transfer.fixed_s + max(0.0, tokens * transfer.s_per_token - compute_s)

    def host_load_s(self, tokens: int) -> float:
        """Time to load these tokens from main memory."""
        return tokens * self._profile.host_load_s_per_token

    def step_s(self, requests: int, context_tokens: float) -> float:
        """Time of a decode step of so many requests with this mean context."""
        return self._profile.step_s(requests, context_tokens)
