"""Results of a run: adapter or model, report, export, generation."""
