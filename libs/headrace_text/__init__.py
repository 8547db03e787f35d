"""Text to tokens and back, model by model."""
