"""Finds a checkpoint's quantisation: in config.json, or in a file next to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrt.base.config_fields import QUANTISATION
from hybridrt.base.config_json import check_fields, read_object
from hybridrt.base.errors import BackendError, ConfigError, UnsupportedModelError, shown
from hybridrt.base.quantization import QuantConfig, QuantRules, Scheme
from hybridrt.layers.linear import BUILT_IN, linear_method
from hybridrt.models.config.quant_compressed import compressed_rules
from hybridrt.models.config.quant_modelopt import modelopt_fields, modelopt_rules
from hybridrt.models.config.quant_names import listed
from hybridrt.models.config.quant_simple import NAMES, awq_rules, fp8_rules, gptq_rules, mxfp4_rules

READERS: dict[str, Callable[[Mapping[str, Any], str], QuantRules]] = {
    "fp8": fp8_rules,
    "compressed-tensors": compressed_rules,
    "modelopt": modelopt_rules,
    "awq": awq_rules,
    "gptq": gptq_rules,
    "mxfp4": mxfp4_rules,
}
INSTEAD = "use the checkpoint that it was made from, or one in fp8, compressed-tensors, AWQ, GPTQ, MXFP4 or by ModelOpt"
# Known methods that are not read, and why.
REFUSED = {
    **dict.fromkeys(BUILT_IN, "it does not say how tensors are named and packed"),
    "bitsandbytes": "it stores blocks of the flattened matrix",
    "torchao": "what its tensors mean depends on the version of torchao that wrote them",
    "gguf": "it has no config.json of its own",
}
# Of a package's own method: fields that list plain modules.
LISTS = dict.fromkeys(("modules_to_not_convert", "ignored_layers", "ignore"), NAMES)
SIDE_FILE, OLDER_GPTQ = "hf_quant_config.json", "quantize_config.json"


@dataclass(frozen=True)
class OutsideRules(QuantRules):
    """A method that a package brings (entry points of hybridrt.linear_methods), named as
    quant_method. It gets the configuration as options."""

    name: str
    options: Mapping[str, Any]

    def scheme(self, module: str) -> Scheme | None:
        return Scheme(self.name, options=self.options)

    def leaves_plain(self, module: str) -> bool:
        return listed([each for name in LISTS for each in self.options.get(name) or ()], module)


def read_quant_config(path: Path, raw: Mapping[str, Any], text: Mapping[str, Any]) -> QuantConfig | None:
    """The quantisation of a checkpoint directory; None for a plain one.

    Args:
        raw: config.json. text: its part for the text model, or the same.

    Raises:
        ConfigError: the configuration cannot be used, or two files contradict each other.
        UnsupportedModelError: hybridrt does not read this kind of quantisation.
    """
    key, said = next(((key, part[key]) for part in (raw, text) for key in QUANTISATION if part.get(key)), ("", None))
    side = _side_file(path / SIDE_FILE)
    if said is None:
        older = path / OLDER_GPTQ
        if side is None and older.exists():
            return QuantConfig(gptq_rules(read_object(older), str(older)))
        return None if side is None else QuantConfig(modelopt_rules(side, str(path / SIDE_FILE)))
    where = f"{path / 'config.json'}: {key}"
    name = said.get("quant_method")
    if not isinstance(name, str):
        raise ConfigError(f"{where}: quant_method is {shown(name)}; it must name one of {', '.join(READERS)}")
    name = "modelopt" if name.startswith("modelopt") else name
    if side is not None:
        ours = modelopt_fields(said, where) if name == "modelopt" else {"quant_algo": name}
        _check_agreement(ours, side, where, path / SIDE_FILE)
        if name == "modelopt":
            said, where = side | ours, f"{where}, with {SIDE_FILE}"
    return QuantConfig(READERS[name](said, where) if name in READERS else _other_rules(name, said, where))


def _side_file(file: Path) -> dict[str, Any] | None:
    """What hf_quant_config.json says of the weights: nothing, if it has an algorithm for the KV cache alone."""
    if not file.exists():
        return None
    said = read_object(file).get("quantization")
    if not isinstance(said, dict):
        raise ConfigError(f"{file}: quantization is {shown(said)}; it must be an object with quant_algo")
    found = modelopt_fields(said, str(file))
    return found if "quant_algo" in found else None


def _check_agreement(ours: Mapping[str, Any], side: Mapping[str, Any], where: str, file: Path) -> None:
    """Compares the fields that both have. Lists of plain modules may differ, as the files' tensors say which are plain:
    config.json's counts, which other engines read, too."""
    for name in sorted(ours.keys() & side.keys() - {"exclude_modules"}):
        if ours[name] != side[name]:
            raise ConfigError(
                f"{file}: {name} is {shown(side[name])}, but {where} says {shown(ours[name])}; remove the file that is "
                "wrong"
            )


def _other_rules(name: str, said: Mapping[str, Any], where: str) -> QuantRules:
    if name in REFUSED:
        raise UnsupportedModelError(
            f"{where}: quant_method is {name}, which hybridrt does not read ({REFUSED[name]}): {INSTEAD}"
        )
    try:
        linear_method(name)
    except BackendError as e:
        raise UnsupportedModelError(
            f"{where}: quant_method is {shown(name)}, which neither hybridrt nor a package reads ({e}): {INSTEAD}"
        ) from e
    check_fields(said, LISTS, where)
    return OutsideRules(name, dict(said))
