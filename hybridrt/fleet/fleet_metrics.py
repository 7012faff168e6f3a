"""Metrics of a router, and those of all its replicas under one name each."""

import re
from collections.abc import Iterable
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from hybridrt.fleet.replica_client import ReplicaClient

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
MAX_BYTES = 2**22  # of one replica's
GONE = "gone"  # stands for all replicas that there are no more: names that come and go would be ever more series


class RouterMetrics:
    """Counters of a router."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        at = self.registry
        self.requests = Counter("hybridrt_router_requests", "Requests by replica.", ["replica"], registry=at)
        self.retries = Counter("hybridrt_router_retries", "Requests that were sent to another replica.", registry=at)
        self.cut = Counter(
            "hybridrt_router_cut_streams",
            "Streams that ended with their replica.",
            registry=at,
        )
        self.wrong = Counter(
            "hybridrt_router_wrong_answers",
            "Answers that were none, by replica and reason.",
            ["replica", "reason"],
            registry=at,
        )
        self.resumed = Counter("hybridrt_router_resumed_streams", "Streams that went on elsewhere.", registry=at)
        self.prompt_tokens = Counter("hybridrt_router_prompt_tokens", "Prompt tokens, as far as known.", registry=at)
        self.prefix_tokens = Counter(
            "hybridrt_router_prefix_tokens", "Prompt tokens that the chosen replicas had, as far as known.", registry=at
        )
        self.ready = Gauge("hybridrt_router_replica_ready", "1: the replica gets requests.", ["replica"], registry=at)
        self.load = Gauge("hybridrt_router_replica_requests", "Requests that have not ended.", ["replica"], registry=at)
        self._known = set[str]()

    def add(self, url: str) -> None:
        """There is a replica now."""
        self._known.add(url)

    def count(self, replica: str, tokens: int, prefix: int, attempt: int) -> None:
        """A request goes to a replica; of its prompt, `prefix` tokens are there."""
        self.requests.labels(self._label(replica)).inc()
        self.prompt_tokens.inc(tokens if attempt == 0 else 0)
        self.prefix_tokens.inc(prefix if attempt == 0 else 0)
        self.retries.inc(attempt > 0)

    def count_wrong(self, replica: str, reason: str) -> None:
        """An answer of a replica was none. It may come after `forget`."""
        self.wrong.labels(self._label(replica), reason).inc()

    def forget(self, url: str) -> None:
        """A replica that has gone is neither ready nor loaded. What it got stays counted, under GONE."""
        self._known.discard(url)
        for gauge in (self.ready, self.load):
            with suppress(KeyError):  # never shown
                gauge.remove(url)
        for counter in (self.requests, self.wrong):
            _move(counter, url)

    def _label(self, replica: str) -> str:
        return replica if replica in self._known else GONE

    def text(self, replicas: Iterable[ReplicaClient]) -> str:
        for replica in replicas:
            self.ready.labels(replica.url).set(replica.serves)
            self.load.labels(replica.url).set(replica.placed.requests)
        return generate_latest(self.registry).decode()


def _move(counter: Counter, url: str) -> None:
    """Adds a replica's counts to those of GONE, and removes their series."""
    for sample in [sample for family in counter.collect() for sample in family.samples]:
        if sample.name.endswith("_total") and sample.labels["replica"] == url:
            counter.labels(**sample.labels | {"replica": GONE}).inc(sample.value)
            counter.remove(*sample.labels.values())


def merged(texts: dict[str, str]) -> str:
    """Metrics of several replicas [url → Prometheus' text], each sample with its replica as a label."""
    heads, samples = dict[str, str](), dict[str, list[str]]()
    for url, text in texts.items():
        name = ""
        for line in text[:MAX_BYTES].splitlines():
            if line.startswith("# "):
                _, kind, name, *_ = [*line.split(" ", 3), "", ""]
                heads.setdefault(f"{name} {kind}", line)
                samples.setdefault(name, [])
            elif (found := _SAMPLE.fullmatch(line)) is not None:
                own = f'replica="{url}"' + (f",{found[2]}" if found[2] else "")
                samples.setdefault(name, []).append(f"{found[1]}{{{own}}} {found[3]}")
    lines = list[str]()
    for name, found_lines in samples.items():
        lines += [heads[key] for key in (f"{name} HELP", f"{name} TYPE") if key in heads]
        lines += found_lines
    return "\n".join(lines) + "\n" if lines else ""
