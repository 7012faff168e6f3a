"""Load on a server or an engine, and its timings."""
