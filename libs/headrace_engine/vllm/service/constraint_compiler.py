"""Compiles constraints of answers within bounds: python -m MODULE CPU_S MEMORY_BYTES.

It reads a JSON object with the `kind` and the `spec` of a constraint from each line, and prints a line for it: seconds
of processor time, or what was exceeded. Each is compiled in a process of its own, which the kernel ends at its bounds.
Compilers spend their time on the automaton, so that a vocabulary of bytes measures it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any, Final

_NICENESS: Final = 10
# A token of the model in a grammar, by name or number.
_TOKEN: Final = re.compile(r'<[^<>\s"]+>')


class _Bytes:
    """A tokenizer of which each token is a byte."""

    eos_token_id = 256
    bos_token_id = None
    unk_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"<eos>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def main(cpu_s: float, memory_bytes: int) -> None:
    """Serves until the end of stdin."""
    import llguidance

    os.nice(_NICENESS)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    for line in sys.stdin.buffer:
        before_s = _children_s()
        process = os.fork()
        if not process:
            _limit(cpu_s, memory_bytes)
            _compile(tokenizer, json.loads(line))
        _, status = os.waitpid(process, 0)
        print(_exceeded(status) or _children_s() - before_s, flush=True)


def _exceeded(status: int) -> str:
    """Which bound has ended a process. Empty for none."""
    if not os.WIFSIGNALED(status):
        return ""
    return "time" if os.WTERMSIG(status) == signal.SIGPROF else "memory"


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _limit(cpu_s: float, memory_bytes: int) -> None:
    """Ends this process with a signal once it has used its processor time, or has no more memory."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    used_bytes = int(pages) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _compile(tokenizer: Any, constraint: dict[str, Any]) -> None:
    """Compiles as vLLM's backend does, and ends the process."""
    import llguidance

    try:
        grammar = _grammar(constraint["kind"], constraint["spec"])
        llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    except MemoryError:
        os.abort()
    # What else is wrong is the engine's to report.
    except BaseException:  # noqa: BLE001
        os._exit(0)
    os._exit(0)


def _grammar(kind: Any, spec: str) -> str:
    import llguidance

    if kind == "structural_tag":
        parts = json.loads(spec)
        tags = [
            llguidance.StructTag(
                trigger=next(one for one in parts["triggers"] if part["begin"].startswith(one)),
                begin=part["begin"],
                grammar=_grammar("json", json.dumps(part["schema"])),
                end=part["end"],
            )
            for part in parts["structures"]
        ]
        return str(llguidance.StructTag.to_grammar(tags))
    if kind == "json":
        schema = llguidance.LLMatcher.grammar_from_json_schema(
            spec, defaults={"whitespace_flexible": True}
        )
        return str(schema)
    if kind == "grammar":
        # This vocabulary has none of the model's tokens. Any token costs as much.
        spec = _TOKEN.sub("<[*]>", spec)
    return str(llguidance.grammar_from(kind, spec))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
