"""Checkpoints, the output directory, and continuing from both."""
