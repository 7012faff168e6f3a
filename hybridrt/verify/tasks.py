"""Tasks of lm-eval, if that package is installed."""

import importlib.util
from collections.abc import Sequence

from hybridrt.base.errors import ProviderNotInstalledError, reason
from hybridrt.verify.results import Result
from hybridrt.verify.subject import Subject


def check_tasks(subject: Subject, result: Result, tasks: Sequence[str], limit: int | None) -> None:
    """Runs tasks with lm-eval against a server of this checkpoint.

    Raises:
        ProviderNotInstalledError: lm-eval is missing.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ProviderNotInstalledError("tasks need lm-eval: pip install '.[clients]'")
    from lm_eval import simple_evaluate

    from hybridrt.verify.served import served

    subject.close()  # the server takes most of the device's memory
    with served(subject) as url:
        subject.begin(f"tasks {', '.join(tasks)}")
        arguments = f"model={subject.path},base_url={url}/v1/completions,tokenized_requests=False"
        try:
            found = simple_evaluate(
                model="local-completions", model_args=arguments, tasks=list(tasks), limit=limit,
                confirm_run_unsafe_code=False,
            )  # fmt: skip
        except Exception as e:  # of any type
            return result.fail(f"lm-eval: {type(e).__name__}: {reason(e)}")
    result.figures["tasks"] = {name: dict(scores) for name, scores in found["results"].items()}
    result.done(f"{len(tasks)} tasks" + ("" if limit is None else f", {limit} questions each"))
