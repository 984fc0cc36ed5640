"""What must move and in what order: plans, descriptor indices and the scheduler. Pure: no I/O, no clock."""
