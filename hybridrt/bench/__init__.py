"""Load on a server or on an engine, and what came of it."""
