"""Writes a checkpoint with random weights in bfloat16, for reports of `hybridrt verify` about a shape.

    python -m scripts.random_checkpoint benchmarks/configs/falcon-h1-7b DIRECTORY
    hybridrt verify DIRECTORY --quick --out falcon-h1-7b-h100 --note "random weights"

The head is scaled so that logits differ: with the multipliers of some families all tokens would be about equally
likely, and a comparison of log-probabilities would show nothing.
"""

import argparse
import math
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SPREAD = 1.3  # standard deviation of the logits
DEVIATION = 0.02  # of weights that transformers leaves as they are
SHARD = "4GB"


@torch.no_grad()
def write(source: Path, into: Path, device: torch.device) -> None:
    """Writes the weights of a config.json in `source`. FileExistsError: `into` has something."""
    if into.exists() and any(into.iterdir()):
        raise FileExistsError(f"{into} has files; name a directory that is empty or not there")
    config = AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(0)
    model.to_empty(device=device)
    for parameter in model.parameters():
        parameter.normal_(0.0, DEVIATION)
    model.init_weights()
    for buffer in model.buffers():  # rotary frequencies, which are no weights; the model is not run
        buffer.zero_()
    head = model.get_output_embeddings()
    head.weight.normal_(0.0, SPREAD / math.sqrt(config.hidden_size) / getattr(config, "lm_head_multiplier", 1.0))
    model.save_pretrained(into, max_shard_size=SHARD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="directory with a config.json")
    parser.add_argument("into", type=Path, help="directory of the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    write(args.source, args.into, torch.device(args.device))


if __name__ == "__main__":
    main()
