"""Checks of a checkpoint on this machine, and of two servers against each other."""
