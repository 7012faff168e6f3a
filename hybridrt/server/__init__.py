"""The HTTP API: endpoints of OpenAI and Anthropic on top of AsyncLLM. Needs the extra `serve`."""
