"""Metrics for Prometheus, under vLLM's names if it has them: its dashboards and gateways work."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from hybridrt.engine.api.async_llm import AsyncLLM
from hybridrt.engine.api.engine_loop import StepMessage
from hybridrt.engine.request.outputs import Delta, EngineCounters

# Every reader takes this version; 1.0.0 is for names of any characters.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

# vLLM's buckets, in seconds.
_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5,
    10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_STEP = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)
_AT_END: dict[str, tuple[str, tuple[float, ...]]] = {
    "e2e_request_latency_seconds": ("From arrival to the last token.", _WHOLE),
    "request_queue_time_seconds": ("From arrival until a sample runs.", _WHOLE),
    "request_inference_time_seconds": ("From then to the last token.", _WHOLE),
    "request_prefill_time_seconds": ("From then to the first token.", _WHOLE),
    "request_decode_time_seconds": ("From the first token to the last.", _WHOLE),
    "request_time_per_output_token_seconds": ("Mean time between a sample's tokens.", _BETWEEN),
    "request_prompt_tokens": ("Prompt tokens of a sample.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Those that the prefix cache did not have.", _TOKENS),
    "request_generation_tokens": ("Output tokens of a sample.", _TOKENS),
    "request_max_num_generation_tokens": ("Output tokens of a request's longest sample.", _TOKENS),
    "request_params_max_tokens": ("max_tokens of a request.", _TOKENS),
    "request_params_n": ("n of a request.", (1, 2, 5, 10, 20)),
}


class Histogram:
    """Counts of values up to each bound. prometheus_client's own locks for each value, here for
    each token, in the event loop."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def total(self) -> int:
        return sum(self.counts)

    def family(self, labels: dict[str, str]) -> HistogramMetricFamily:
        total, buckets = 0, []
        for bound, count in zip([*map(str, map(float, self.bounds)), "+Inf"], self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(self.name, self.text, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self.sum)
        return family


@dataclass(frozen=True)
class Number:
    """A metric of one value, or of one for each value of a label. `counts`: it only grows."""

    name: str
    text: str
    value: float | Mapping[str, float]
    counts: bool = True
    label: str = ""


class Metrics(Collector):
    """Watches the steps of an AsyncLLM, and reads its engine's counters when asked. `more`: of the
    server's role."""

    def __init__(self, llm: AsyncLLM, model: str, more: Callable[[], Sequence[Number]] = tuple) -> None:
        self._llm, self._more = llm, more
        self._labels = {"model_name": model, "engine": "0"}
        self.prompt_tokens = self.output_tokens = 0
        self._ends: Counter[str] = Counter()
        self._last: dict[tuple[str, int], float] = {}
        self._ended: dict[str, list[int]] = {}  # output tokens of samples whose siblings run
        self._first = Histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST)
        self._between = Histogram("vllm:inter_token_latency_seconds", "Between two tokens of a sample.", _BETWEEN)
        self._steps = Histogram("hybridrt:step_seconds", "A step on the host, waiting for the device included.", _STEP)
        self._at_end = {name: Histogram(f"vllm:{name}", *about) for name, about in _AT_END.items()}
        self._registry = CollectorRegistry()
        for collector in (self, ProcessCollector(registry=None), PlatformCollector(registry=None)):
            self._registry.register(collector)
        llm.watchers.append(self.watch)

    def first_tokens(self) -> tuple[int, float]:
        """How many first tokens there were, and the seconds to all of them."""
        return self._first.total, self._first.sum

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def watch(self, message: StepMessage) -> None:
        now = time.monotonic()
        self._steps.add(message.seconds)
        for delta in message.deltas:
            gained = len(delta.token_ids)
            self.output_tokens += gained
            key = delta.request_id, delta.index
            last = self._last.get(key)
            if last is not None and gained:
                self._between.add((now - last) / gained, gained)
            if delta.finish_reason is None:
                self._last[key] = now
                if last is None:
                    self._count_begin(delta, now)
            else:
                self._last.pop(key, None)
                self._count_end(delta, last is None)
                self._count_request(delta)

    def _count_begin(self, delta: Delta, now: float) -> None:
        stream = self._llm.stream_of(delta.request_id)
        if stream is not None:  # its client is there
            self._first.add(now - stream.arrival)
            self._count_prompt(delta, len(stream.requests[delta.request_id].tokens))

    def _count_prompt(self, delta: Delta, tokens: int) -> None:
        self.prompt_tokens += tokens if delta.index == 0 else 0

    def _count_end(self, delta: Delta, at_once: bool) -> None:
        """`at_once`: all tokens came in this delta, so only their mean distance is known."""
        metrics = delta.metrics
        assert metrics is not None and delta.finish_reason is not None, "it is the sample's last delta"
        self._ends["error" if delta.error is not None else delta.finish_reason] += 1
        if at_once:
            self._count_prompt(delta, metrics.prompt_tokens)
        if metrics.admission_time is None or metrics.first_token_time is None or metrics.finish_time is None:
            return
        if at_once:
            self._first.add(metrics.first_token_time - metrics.arrival_time)
        decoding = metrics.finish_time - metrics.first_token_time
        for name, value in (
            ("e2e_request_latency_seconds", metrics.finish_time - metrics.arrival_time),
            ("request_queue_time_seconds", metrics.admission_time - metrics.arrival_time),
            ("request_inference_time_seconds", metrics.finish_time - metrics.admission_time),
            ("request_prefill_time_seconds", metrics.first_token_time - metrics.admission_time),
            ("request_decode_time_seconds", decoding),
            ("request_prompt_tokens", metrics.prompt_tokens),
            ("request_generation_tokens", metrics.output_tokens),
            ("request_prefill_kv_computed_tokens", metrics.prompt_tokens - metrics.cached_tokens),
        ):
            self._at_end[name].add(value)
        if (rest := metrics.output_tokens - 1) > 0:
            self._at_end["request_time_per_output_token_seconds"].add(decoding / rest)
            if at_once:
                self._between.add(decoding / rest, rest)

    def _count_request(self, delta: Delta) -> None:
        """Counts at the end of its last sample, if the client is still there."""
        stream, ended = self._llm.stream_of(delta.request_id), self._ended.pop(delta.request_id, [])
        if stream is None or delta.metrics is None:
            return
        ended.append(delta.metrics.output_tokens)
        params = stream.requests[delta.request_id].params
        if len(ended) < params.n:
            self._ended[delta.request_id] = ended
            return
        self._at_end["request_params_n"].add(params.n)
        self._at_end["request_max_num_generation_tokens"].add(max(ended))
        if params.max_tokens is not None:
            self._at_end["request_params_max_tokens"].add(params.max_tokens)

    def collect(self) -> Iterator[Family]:
        counters = self._llm.llm.engine.counters()
        yield from self._gauges(counters)
        yield from self._counters(counters)
        yield from self._experts(self._llm.llm.expert_tokens())
        for found in self._more():
            kind = CounterMetricFamily if found.counts else GaugeMetricFamily
            if not isinstance(found.value, Mapping):
                yield self._family(kind, found.name, found.text, float(found.value))
                continue
            family = kind(found.name, found.text, labels=[*self._labels, found.label])
            for label, value in found.value.items():
                family.add_metric([*self._labels.values(), label], value)
            yield family
        for histogram in (self._first, self._between, self._steps, *self._at_end.values()):
            yield histogram.family(self._labels)
        ends = CounterMetricFamily(
            "vllm:request_success", "Samples that have ended.", labels=[*self._labels, "finished_reason"]
        )
        for reason in ("stop", "length", "abort", "error"):
            ends.add_metric([*self._labels.values(), reason], self._ends[reason])
        yield ends
        yield self._config()

    def _gauges(self, now: EngineCounters) -> Iterator[Family]:
        plan = self._llm.llm.plan
        used = 1 - (now.free_pages + now.cached_pages) / now.total_pages if now.total_pages else 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "Samples that run.", now.running),
            ("vllm:num_requests_waiting", "Samples that wait.", self._llm.unfinished - now.running),
            ("vllm:kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.", used),
            ("hybridrt:state_slots", "Recurrent states that there is memory for.", plan.num_slots),
            ("hybridrt:state_slots_free", "Those that no request has.", now.free_slots),
            ("hybridrt:state_slots_cached", "Those of the prefix cache.", now.cached_slots),
            ("hybridrt:kv_bytes_held", "Bytes of KV that running requests hold.", now.kv_bytes_held),
            ("hybridrt:kv_pages_cached", "KV pages of the prefix cache.", now.cached_pages),
            ("hybridrt:host_pages_cached", "KV pages of the prefix cache in main memory.", now.host_pages),
            ("hybridrt:host_states_cached", "States of the prefix cache in main memory.", now.host_states),
            ("hybridrt:audit_error", "Greatest difference of log-probabilities of audits.", now.audit_error),
            ("hybridrt:rows_free", "Further requests that could run.", now.free_rows),
            ("hybridrt:step_cost_error_ratio", "Median error of predicted times.", now.step_cost_error or 0.0),
            ("hybridrt:folds_per_step_max", "State rings that one step has folded at most.", now.most_folds),
            ("hybridrt:mean_accepted_length", "Inputs that a verify step keeps.", now.mean_accepted_length or 0.0),
        ):
            yield self._family(GaugeMetricFamily, name, text, float(max(value, 0)))

    def _counters(self, now: EngineCounters) -> Iterator[Family]:
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens.", self.prompt_tokens),
            ("vllm:generation_tokens", "Output tokens.", self.output_tokens),
            ("vllm:num_preemptions", "Samples that gave their memory back and began anew.", now.retractions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", now.cache_asked),
            ("vllm:prefix_cache_hits", "Those that were found.", now.cache_hit),
            ("hybridrt:prefix_cache_without_state", "Those whose KV was found, and no state.", now.cache_without_state),
            ("hybridrt:prefix_cache_without_kv", "Those whose KV was evicted.", now.cache_without_kv),
            ("hybridrt:prefix_cache_retokenised", "Those of changed histories.", now.cache_retokenised),
            ("hybridrt:prefix_cache_fetched", "Those that came from main memory.", now.cache_fetched),
            ("hybridrt:prefix_cache_dropped", "Entries whose use gave NaN or infinity.", now.cache_dropped),
            ("hybridrt:audited_hits", "Cached prefixes that were computed again.", now.audited),
            ("hybridrt:audited_hits_differed", "Those that were dropped because of that.", now.audit_differed),
            ("vllm:spec_decode_num_draft_tokens", "Drafts.", now.proposed),
            ("vllm:spec_decode_num_accepted_tokens", "Drafts that were right.", now.accepted),
            ("vllm:spec_decode_num_drafts", "Steps of a sample with drafts.", now.verify_steps),
            ("hybridrt:steps", "Steps of the engine.", now.steps),
            ("hybridrt:folds", "State rings that steps have folded into states.", now.folds),
            ("hybridrt:encoded_images", "Images, or their tiles, that the encoder has read.", now.encoded_spans),
            ("hybridrt:encoded_image_tokens", "Their tokens.", now.encoded_tokens),
            ("hybridrt:encoder_cache_hits", "Images whose embeddings were still there.", now.encoder_hits),
            ("hybridrt:encoder_host_hits", "Images whose embeddings were in main memory.", now.encoder_host_hits),
            ("hybridrt:encoder_waits", "Prompt chunks that ended in front of an image.", now.encoder_waits),
            ("hybridrt:prefill_tokens", "Prompt tokens computed, those computed again included.", now.prompt_tokens),
            ("hybridrt:samples_failed", "Samples that ended with an error.", now.failed),
        ):
            yield self._family(CounterMetricFamily, name, text, float(value))

    def _experts(self, tokens: list[list[int]]) -> Iterator[Family]:
        """Balance of experts over ranks. Of a layer, the busiest rank decides how long a step takes."""
        if not tokens:
            return
        name, text = "hybridrt:expert_tokens", "Tokens that a rank's experts have computed, over all layers."
        family = CounterMetricFamily(name, text, labels=[*self._labels, "rank"])
        for rank, totals in enumerate(zip(*tokens, strict=True)):
            family.add_metric([*self._labels.values(), str(rank)], sum(totals))
        yield family
        ratios = [max(layer) * len(layer) / sum(layer) for layer in tokens if sum(layer)]
        mean, text = sum(ratios) / len(ratios) if ratios else 1.0, "The busiest rank's tokens over the mean, by layer."
        yield self._family(GaugeMetricFamily, "hybridrt:expert_imbalance", text, mean)

    def _family(self, kind: type[Family], name: str, text: str, value: float) -> Family:
        family = kind(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)  # type: ignore[call-arg,arg-type]
        return family

    def _config(self) -> Family:
        plan = self._llm.llm.plan
        facts = {"block_size": plan.page_size, "num_gpu_blocks": plan.num_pages, "num_state_slots": plan.num_slots}
        labels = {**self._labels, **{name: str(value) for name, value in facts.items()}}
        family = GaugeMetricFamily("vllm:cache_config_info", "Sizes of the caches.", labels=list(labels))
        family.add_metric(list(labels.values()), 1.0)
        return family
