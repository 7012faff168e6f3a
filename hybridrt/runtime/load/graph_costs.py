"""Which graphs a run captures, and the bytes of their buffers."""

from hybridrt.base.engine_config import EngineConfig
from hybridrt.recurrent.backends import prompt_graph_bytes
from hybridrt.runtime.load.draft_needs import draft_needs
from hybridrt.runtime.load.kept_state import kv_layers, table_length
from hybridrt.runtime.load.target import RunTarget
from hybridrt.runtime.step.pack_padded import DECODE_ROWS, PROMPT_ROWS

DEFAULT_ROWS = {"cpu": 16, "cuda": 256}


def graph_bytes(config: EngineConfig, target: RunTarget, max_len: int) -> int:
    """The graphs' largest static buffers: logits, and those of attention for a request of `max_len` tokens."""
    rows, mc, of_attention = graph_rows(config, target), target.model_config, 0
    tokens = rows * sum(step_widths(config))
    if rows and wants_prompt_graphs(config, target):
        tokens += min(DECODE_ROWS[-1], rows) + PROMPT_ROWS
        specs, longest = kv_layers(config, target), table_length(config, target, max_len)
        of_attention = prompt_graph_bytes(config, target.device, specs, longest)
    return tokens * mc.vocab_size * target.dtype.itemsize + of_attention


def wants_prompt_graphs(config: EngineConfig, target: RunTarget) -> bool:
    """Whether steps with prompts get graphs, if the backends can be captured. A drafter on the device needs hidden
    states, which these graphs do not keep; and tokens for other replicas' experts have other numbers in each prompt."""
    return config.cuda_graph_prompts and not draft_needs(config).on_device and target.tp.replicas is None


def graph_rows(config: EngineConfig, target: RunTarget) -> int:
    """Rows of the largest graph that a run may capture; 0 without graphs."""
    if target.device.type != "cuda" or not config.cuda_graph:
        return 0
    return config.cuda_graph_max_bs or config.max_running_requests or DEFAULT_ROWS["cuda"]


def step_widths(config: EngineConfig) -> list[int]:
    """T of every kind of step, the widest first: with drafts, and without."""
    widest = config.num_verify_tokens
    return [1] if widest == 1 else [widest, 1]
