"""How many prefill and decode workers a model needs. Pure: observations in, a decision with its reasons out."""
