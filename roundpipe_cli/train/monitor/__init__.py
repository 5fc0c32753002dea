"""Reports of a run while it trains: metrics, events, trackers."""
