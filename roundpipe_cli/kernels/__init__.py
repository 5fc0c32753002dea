"""Kernels and fused operators of our own for what libraries launch in many pieces. They know no model, and everything
computes without them."""
