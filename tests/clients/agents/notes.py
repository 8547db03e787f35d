"""A server of the Model Context Protocol with one tool, which reads a note: python notes.py FILE"""

import json
import sys
from pathlib import Path

TOOL = {"name": "read_note", "description": "Reads.", "inputSchema": {"type": "object"}}

for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    result = {}
    match message["method"]:
        case "initialize":
            result = {
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "notes", "version": "1"},
            }
        case "tools/list":
            result = {"tools": [TOOL]}
        case "tools/call":
            result = {"content": [{"type": "text", "text": Path(sys.argv[1]).read_text()}]}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
