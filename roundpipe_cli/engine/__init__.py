"""Runs a schedule on devices: stores, transfers, workers."""
