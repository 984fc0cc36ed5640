"""Examine a host, the path between two hosts, and running engines, and report what is wrong: ``kvflow doctor``."""
