"""Measure what reading costs on this machine, and write it into the file that ``KVFLOW_CALIBRATION`` names."""
