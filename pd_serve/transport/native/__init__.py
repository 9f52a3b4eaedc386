"""Copies of many ranges in one call, in C: compiled on the machine they run on, optional, called through ctypes."""
