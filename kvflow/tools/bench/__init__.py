"""Measure what reading costs on this machine."""
