"""LoRA adapters at run time: on every live worker of a model, or on none."""
