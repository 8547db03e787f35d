"""Traces as files for other programs: an HTML page, Chrome's trace events, OTLP."""
