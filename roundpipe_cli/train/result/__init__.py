"""What a run leaves: adapter or model, report, export, generation."""
