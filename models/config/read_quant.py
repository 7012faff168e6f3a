"""Finds a checkpoint's quantisation: in config.json, or in a file next to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrt.base.config_json import check_fields, read_object
from hybridrt.base.errors import BackendError, ConfigError, UnsupportedModelError, shown
from hybridrt.base.quantization import QuantConfig, QuantRules, Scheme
from hybridrt.layers.linear import linear_method
from hybridrt.models.config.quant_compressed import compressed_rules
from hybridrt.models.config.quant_modelopt import modelopt_rules
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
    said = raw.get("quantization_config") or text.get("quantization_config")
    side = _side_file(path)
    if not said:
        older = path / OLDER_GPTQ
        if side is None and older.exists():
            return QuantConfig(gptq_rules(read_object(older), str(older)))
        return None if side is None else QuantConfig(modelopt_rules(side, f"{path / SIDE_FILE}"))
    where = f"{path / 'config.json'}: quantization_config"
    name = said.get("quant_method")
    if not isinstance(name, str):
        raise ConfigError(f"{where}: quant_method is {shown(name)}; it must name one of {', '.join(READERS)}")
    name = "modelopt" if name.startswith("modelopt") else name
    if side is not None:
        _check_agreement(name, said, side, path)
        if name == "modelopt" and _algorithm(said) is None:
            return QuantConfig(modelopt_rules(side, f"{path / SIDE_FILE}"))
    return QuantConfig(READERS[name](said, where) if name in READERS else _other_rules(name, said, where))


def _side_file(path: Path) -> dict[str, Any] | None:
    """What hf_quant_config.json says, if it names any algorithm."""
    file = path / SIDE_FILE
    if not file.exists():
        return None
    said = read_object(file).get("quantization")
    if not isinstance(said, dict):
        raise ConfigError(f"{file}: quantization is {shown(said)}; it must be an object with quant_algo")
    return said if any(said.get(each) is not None for each in ("quant_algo", "kv_cache_quant_algo")) else None


def _check_agreement(name: str, said: Mapping[str, Any], side: Mapping[str, Any], path: Path) -> None:
    ours = _algorithm(said) if name == "modelopt" else name
    if side.get("quant_algo") != ours and not (name == "modelopt" and ours is None):
        raise ConfigError(
            f"{path / SIDE_FILE}: quant_algo is {shown(side.get('quant_algo'))}, but quantization_config of "
            f"config.json says {shown(ours)}; remove the file that is wrong"
        )


def _algorithm(said: Mapping[str, Any]) -> Any:
    """The algorithm of ModelOpt's configuration, in either of its forms."""
    nested = said.get("quantization")
    return (nested if isinstance(nested, Mapping) else said).get("quant_algo")


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
