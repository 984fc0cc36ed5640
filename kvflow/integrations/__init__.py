"""Engines that embed kvflow. Each folder knows one engine, and of kvflow its public names only."""
