"""Leases on blocks: tickets, their issuer, the lease table, epochs and block counts. Pure: time is an argument."""
