"""One file per kind of device behind one small interface."""
