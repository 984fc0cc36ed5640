"""Join the log records of a router and of workers by request, and show where the time of each request went."""
