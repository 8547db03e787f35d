"""Commands that create keys, tokens and certificates."""
