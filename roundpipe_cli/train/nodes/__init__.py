"""Several machines."""
