"""A Ray Serve application of replicas of a model: `serve run hybridrt.fleet.ray:app model=MODEL`.

Ray starts replicas on its machines, each in a placement group with the GPUs of its tensor-parallel
ranks, scales them by requests, by those that wait and by the time to the first token, and replaces one
that has failed. Requests go through the router of hybridrt, which knows what replicas have cached.
"""

import secrets
from dataclasses import fields
from typing import Any

import msgspec

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError, ProviderNotInstalledError, shown
from hybridrt.channel.keys import find_fleet_key
from hybridrt.fleet.ray_scaling import ScalingPolicy

HEALTH_SECONDS = 5.0
MAX_REQUESTS = 65_536  # of the router
TARGETS = ("target_requests", "target_waiting", "target_first_token_s")


class RayOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `app`, each KEY=VALUE on the command line.

    Attributes:
        model: checkpoint directory or hub name.
        min_replicas, max_replicas: between which Ray scales.
        target_requests: running and waiting requests of a replica that Ray aims at.
        target_waiting: of these, those that wait.
        target_first_token_s: seconds to the first token; Ray adds replicas if they take longer.
        upscale_delay, downscale_delay: seconds for which more or fewer replicas must be wanted.
        gpus: of each replica, those of its `tp_size` ranks, on one host; 0: a CPU.
        cpus: cores that each replica reserves.
        drain_timeout: seconds that running requests get when a replica ends.
        resume: a stream whose replica is lost goes on at another one.
        engine: further arguments of LLM, as a JSON object.
    """

    model: str = "embedded"
    min_replicas: int = 1
    max_replicas: int = 4
    target_requests: float = 16.0
    target_waiting: float = 4.0
    target_first_token_s: float = 2.0
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    gpus: int = 1
    cpus: float = 1.0
    drain_timeout: float = 30.0
    resume: bool = False
    engine: str = "{}"

    def engine_options(self) -> dict[str, Any]:
        try:
            found = msgspec.json.decode(self.engine, type=dict[str, Any])
        except msgspec.MsgspecError as e:
            raise ConfigError(f"engine is {self.engine!r}; it must be a JSON object of arguments of LLM: {e}") from e
        known = {field.name for field in fields(EngineConfig)} - {"model"}
        if unknown := found.keys() - known:
            raise ConfigError(f"engine has {shown(min(unknown))}, which is no further argument of LLM")
        return {"tp_size": max(self.gpus, 1), "device": "cuda" if self.gpus else "cpu"} | found

    def deployment_options(self) -> dict[str, Any]:
        """Options of Ray Serve for the replicas. A replica's bundle of resources is on one host, and its actor has
        all GPUs of it."""
        bundle = {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})
        targets = {name: getattr(self, name) for name in TARGETS}
        return {
            "name": "replica",
            "ray_actor_options": {"num_gpus": self.gpus, "num_cpus": self.cpus},
            "placement_group_bundles": [bundle],
            "placement_group_strategy": "STRICT_PACK",
            "autoscaling_config": {
                "min_replicas": self.min_replicas,
                "max_replicas": self.max_replicas,
                "upscale_delay_s": self.upscale_delay,
                "downscale_delay_s": self.downscale_delay,
                "policy": {"policy_function": ScalingPolicy, "policy_kwargs": targets},
            },
            "health_check_period_s": HEALTH_SECONDS,
            "graceful_shutdown_timeout_s": self.drain_timeout + 10,
        }


def app(arguments: dict[str, Any]) -> Any:
    """The application, a ray.serve.Application. Its fleet key is that of HYBRIDRT_FLEET_KEY, or else a random one.

    Args:
        arguments: fields of RayOptions; texts count as their numbers.

    Raises:
        ConfigError: a field is unknown, or cannot be used; the variable holds no key.
        ProviderNotInstalledError: Ray Serve is not installed.
    """
    try:
        options = msgspec.convert(arguments, RayOptions, strict=False)
    except msgspec.ValidationError as e:
        raise ConfigError(f"arguments of hybridrt.fleet.ray:app: {e}") from e
    if not 0 < options.min_replicas <= options.max_replicas or options.gpus < 0:
        raise ConfigError(f"{options} needs 0 < min_replicas <= max_replicas, and gpus of 0 or more")
    if min(getattr(options, name) for name in TARGETS) <= 0:
        raise ConfigError(f"{options} needs targets above 0")
    engine, fleet_key = options.engine_options(), find_fleet_key(None)
    try:
        from ray import serve
    except ImportError as e:
        raise ProviderNotInstalledError(f"Ray Serve cannot be loaded ({e}): pip install '.[ray]'") from e
    from hybridrt.fleet.ray_replica import Ingress, RayReplica

    name, fleet_key = f"addresses-{secrets.token_hex(8)}", fleet_key or secrets.token_hex(32)
    replicas = serve.deployment(**options.deployment_options())(RayReplica).bind(
        options.model, engine, name, fleet_key, options.drain_timeout
    )
    router = serve.deployment(name="router", max_ongoing_requests=MAX_REQUESTS, ray_actor_options={"num_cpus": 0.1})
    return router(Ingress).bind(options.model, name, fleet_key, options.resume, replicas)
