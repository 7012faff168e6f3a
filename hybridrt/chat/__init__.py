"""Conversations: messages to tokens, and text back to content, reasoning and tool calls."""
