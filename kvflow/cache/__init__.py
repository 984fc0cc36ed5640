"""Who holds which block until when: tickets, leases, epochs, quarantine. Pure: time and randomness come in."""
