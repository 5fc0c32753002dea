"""The optimizer on the host, its schedule and its thread."""
