"""The training loop, the host optimizer, checkpoints."""
