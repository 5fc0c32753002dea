"""The search for the fastest partition."""
