"""Operators in C++ for decode on a CPU: compiled on the machine they run on, optional, called through ctypes."""
