"""What a model's files hold, read one weight at a time."""
