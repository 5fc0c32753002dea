"""Fused operators: autograd functions that launch less than the modules they stand for. They know no model."""
