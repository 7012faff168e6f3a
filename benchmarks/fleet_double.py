"""A server whose engine has no device: `python -m benchmarks.fleet_double --port 8001`, for benchmarks.fleet_check.

Scheduler, prefix cache and HTTP are the real ones. Tokens come from tests/support/mock_executor.py: a stale page or a
lost state changes all that follows.
"""

import argparse

from hybridrt.channel.keys import find_fleet_key
from hybridrt.engine.api.async_llm import AsyncLLM
from hybridrt.server.app import make_app
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.metrics import Metrics
from hybridrt.server.core.service import Service
from hybridrt.server.run import Server, bind, write_logs
from tests.support.scripted_llm import MockRunner, mocked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    config = ServerConfig(port=port, access_log=False, stats_interval=0, fleet_key=find_fleet_key(None))
    write_logs("warning")
    with bind(config) as listener, mocked(MockRunner) as (llm, _, _), AsyncLLM(llm) as served:
        service = Service(served, config)
        Server(make_app(service, Metrics(served, "double")), service).run(sockets=[listener])


if __name__ == "__main__":
    main()
