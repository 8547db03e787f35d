"""All modes of instructor for OpenAI's APIs: python instructor_modes.py http://HOST:PORT NOTE"""

import json
import sys
from collections.abc import Iterable
from typing import Any

import instructor
import openai
from pydantic import BaseModel

URL, NOTE = sys.argv[1:]
# The others are of other providers.
MODES = (
    *("FUNCTIONS", "PARALLEL_TOOLS", "TOOLS", "TOOLS_STRICT", "JSON", "JSON_O1", "MD_JSON"),
    *("JSON_SCHEMA", "RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS"),
)


class Report(BaseModel):
    """The form of the answer."""

    note: str
    words: int


client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=30)
messages: Any = [{"role": "user", "content": f"Report this: {NOTE}"}]
found = {}
for name in MODES:
    mode = instructor.Mode[name]
    create = instructor.from_openai(client, mode=mode, model="sim").chat.completions
    if mode is instructor.Mode.PARALLEL_TOOLS:
        (report,) = create.create(Iterable[Report], messages, max_retries=0)
        found[name] = [report.note]
        continue
    report = create.create(Report, messages, max_retries=0)
    *_, last = create.create_partial(Report, messages)
    found[name] = [report.note, last.note]
print(json.dumps(found))
