"""One write and its record, from a layer range to the report of its link."""
