"""Pure planning: which rank copies which bytes."""
