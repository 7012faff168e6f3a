"""From a configuration to an engine over one rank or several."""

from dataclasses import dataclass

from hybridrt.base.device import resolve_device
from hybridrt.base.engine_config import EngineConfig
from hybridrt.collectives.groups import TPGroup
from hybridrt.engine.cache.request_log import check_log
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.text.tokenizer import HFTokenizer, load_tokenizer
from hybridrt.models.config.read_config import read_model_config
from hybridrt.parallel.expert_ranks import ExpertPlace
from hybridrt.parallel.tensor_parallel import TensorParallelExecutor
from hybridrt.runtime.load.model_path import check_places, find_checkpoint
from hybridrt.runtime.precompile.compile_ahead import KernelsAhead
from hybridrt.runtime.run.model_runner import ModelRunner


@dataclass(frozen=True)
class LoadedEngine:
    """Attributes:
    split: the executor over several ranks, to be closed at the end; None with one rank.
    """

    engine: Engine
    runner: ModelRunner
    tokenizer: HFTokenizer | None
    split: TensorParallelExecutor | None


def read_tokenizer(config: EngineConfig) -> HFTokenizer | None:
    """A model's tokenizer. Raises the errors of the configuration and of the model's config.json that are known before
    the model is loaded."""
    check_places(config)
    path = find_checkpoint(config.model)
    if path.is_dir():  # if not, the runner says so
        read_model_config(path)
    return load_tokenizer(path)


def load_engine(config: EngineConfig, progress: bool, experts: ExpertPlace | None = None) -> LoadedEngine:
    """Loads the model on `config.tp_size` ranks. Raises what `LLM` raises.

    Args:
        experts: where replicas meet that share experts. Their kernels are compiled at the first launch.
    """
    if config.request_log is not None:
        check_log(config.request_log)  # now: weights take minutes
    split, ahead, found = None, KernelsAhead if experts is None else None, list[HFTokenizer | None]()

    def read() -> None:
        found.append(read_tokenizer(config))

    if config.tp_size > 1:
        split = TensorParallelExecutor(config, progress=progress, ahead=ahead, experts=experts, meanwhile=read)
        runner = split.runner
    else:
        read()  # before the weights
        replicas = None if experts is None else experts.connect(config, 0, resolve_device(config.device))
        runner = ModelRunner(config, tp=TPGroup(replicas=replicas), progress=progress, ahead=ahead)
    (tokenizer,) = found
    return LoadedEngine(Engine.from_config(config, runner, tokenizer, split=split), runner, tokenizer, split)
