"""Seeing it run: the events that the core returns, as structured records."""
