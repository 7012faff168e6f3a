"""Tasks of lm-eval, if that package is installed."""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrt.base.errors import ProviderNotInstalledError, reason
from hybridrt.verify.results import Result
from hybridrt.verify.subject import Subject

CONCURRENT = 16  # requests
LONGEST = 2048  # tokens of a question with its answer: lm-eval's own limit for servers
_ABOUT = ("name", "alias", "sample_len", "sample_count")  # of a task, among its scores


def check_tasks(subject: Subject, result: Result, tasks: Sequence[str], limit: int | None) -> None:
    """Runs tasks with lm-eval against a server of this checkpoint.

    Args:
        tasks: names that lm-eval has, or YAML files of tasks.
        limit: questions of each; None: all.

    Raises:
        ProviderNotInstalledError: lm-eval is missing.
    """
    if subject.broken or subject.config is None:
        return result.leave_out(subject.broken or "config.json cannot be read")
    if importlib.util.find_spec("lm_eval") is None:
        raise ProviderNotInstalledError("tasks need lm-eval: pip install '.[clients]'")
    from lm_eval import simple_evaluate

    from hybridrt.verify.served import served

    subject.close()  # the server takes most of the device's memory
    subject.begin("starting the server")
    with served(subject) as url:
        subject.begin(f"tasks {', '.join(Path(task).name for task in tasks)}")
        arguments = {
            "model": str(subject.path), "base_url": f"{url}/v1/completions", "tokenized_requests": False,
            "num_concurrent": CONCURRENT, "max_length": min(LONGEST, subject.config.max_position_embeddings),
        }  # fmt: skip
        try:
            found = simple_evaluate(
                model="local-completions", model_args=arguments, tasks=list(tasks), limit=limit,
                confirm_run_unsafe_code=False,
            )  # fmt: skip
        except Exception as e:  # of any type
            return result.fail(f"lm-eval: {type(e).__name__}: {reason(e)}")
    result.figures["tasks"] = {name: dict(scores) for name, scores in found["results"].items()}
    for name, scores in found["results"].items():
        result.done(f"{name}: {'; '.join(_told(scores)) or 'no scores'}{_questions(found, name)}")


def _told(scores: Mapping[str, Any]) -> Iterator[str]:
    """Each score with its standard error. lm-eval names it "metric,filter", and its error "metric_stderr,filter"."""
    for name, score in scores.items():
        metric, _, kind = name.partition(",")
        if name in _ABOUT or metric.endswith("_stderr") or not isinstance(score, int | float):
            continue
        error = scores.get(f"{metric}_stderr,{kind}")
        told = f" ± {error:.4f}" if isinstance(error, int | float) else ""
        yield f"{metric}{f' ({kind})' if kind not in ('', 'none') else ''} {score:.4f}{told}"


def _questions(found: Mapping[str, Any], name: str) -> str:
    count = found.get("n-samples", {}).get(name, {}).get("effective")
    return "" if count is None else f", {count} questions"
