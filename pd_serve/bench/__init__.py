"""Measuring as users would: clients, loads, statistics, results and their pages. Called by `pd-serve bench`; serves nothing itself.

Everything here sees a server from outside, through its HTTP endpoint, so that other servers are measured by the same client.
"""
