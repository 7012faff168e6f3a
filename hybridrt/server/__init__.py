"""The HTTP API: OpenAI's endpoints on top of AsyncLLM. Needs the extra `serve`."""
