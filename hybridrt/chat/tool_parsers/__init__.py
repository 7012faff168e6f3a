"""Formats of tool calls, a file each."""
