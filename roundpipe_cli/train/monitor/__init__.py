"""What a run reports while it trains: metrics, events, trackers."""
