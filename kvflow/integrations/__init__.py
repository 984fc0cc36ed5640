"""Engines that embed kvflow, and what starts them. Each folder knows one, and of kvflow its public names only."""
