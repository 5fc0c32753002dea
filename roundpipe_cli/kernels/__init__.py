"""Kernels of our own for what libraries launch in many pieces. Everything computes without them."""
