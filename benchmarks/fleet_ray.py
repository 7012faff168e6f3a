"""Replicas under Ray Serve: `python -m benchmarks.fleet_ray --port 8001 --replicas 4`, for benchmarks.fleet_check.

A Ray of its own on this machine, with one core for each replica that it counts and does not reserve. It ends with
SIGTERM.
"""

import argparse
import json
import os
import signal

from benchmarks.fleet_processes import LONGEST, ROWS
from hybridrt.fleet.ray import app

ENGINE = json.dumps({"max_running_requests": ROWS, "max_model_len": LONGEST})
# Of a run that scales: Ray decides within seconds, by fewer requests than run at a time.
EAGER = {"target_requests": 2, "upscale_delay": 1, "downscale_delay": 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--scale", action="store_true", help="from one replica to all, as requests come and go")
    parser.add_argument("--resume", action="store_true", help="the router resumes streams")
    args = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve

    options = {"gpus": 0, "cpus": 0.1, "engine": ENGINE, "resume": args.resume, **(EAGER if args.scale else {})}
    numbers = {"min_replicas": 1 if args.scale else args.replicas, "max_replicas": args.replicas}
    ray.init(num_cpus=args.replicas, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": args.port})
        serve.run(app({**options, **numbers}))
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main()
