"""A proxy that serves two vLLM servers, one for prefill and one for decode, as one."""
