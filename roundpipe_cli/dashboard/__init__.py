"""What the user sees while training. No torch."""
