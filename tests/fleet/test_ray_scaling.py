"""How many replicas Ray Serve would run. Needs no Ray."""

from types import SimpleNamespace
from typing import Any

import pytest

from hybridrt.fleet.ray import RayOptions
from hybridrt.fleet.ray_scaling import ScalingPolicy

POLICY = ScalingPolicy(target_requests=10, target_waiting=4, target_first_token_s=2)


@pytest.mark.parametrize(
    ("recorded", "wanted"),
    [
        (None, 0),
        ({"requests": {"a": 25, "b": 5}}, 3),
        ({"requests": {"a": 10, "b": 5}, "waiting": {"a": 8, "b": 8}}, 4),
        ({"requests": {"a": 10, "b": 5}, "first_token_s": {"a": 2.5, "b": 3.5}}, 3),
        ({"requests": {"a": 10, "b": 5}, "first_token_s": {"a": 60.0, "b": 0.0}}, 4),
        ({"requests": {"a": 10, "b": 5}, "first_token_s": {"a": 1.9, "b": 0.0}}, 1.5),
    ],
)
def test_the_largest_need_counts(recorded: dict[str, dict[str, float]] | None, wanted: float) -> None:
    context: Any = SimpleNamespace(current_num_replicas=2, aggregated_metrics=recorded)
    assert POLICY(context) == (wanted, {})


def test_ranks_of_a_replica_are_in_one_bundle() -> None:
    options = RayOptions(gpus=4, cpus=8).deployment_options()
    assert options["placement_group_bundles"] == [{"CPU": 8, "GPU": 4}]
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert options["ray_actor_options"]["num_gpus"] == 4
    assert RayOptions(gpus=4).engine_options()["tp_size"] == 4
    assert RayOptions(gpus=0).deployment_options()["placement_group_bundles"] == [{"CPU": 1.0}]
