"""Readers of a model's files, one weight at a time."""
