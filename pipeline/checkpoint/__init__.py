"""Checkpoint folders in public formats, read into one form."""
