"""Finds tensors that differ from those of the same name in other layers."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from hybridrt.verify.results import Result
from hybridrt.verify.tensor_stats import TensorStats

_TABLE = re.compile(r"embed|lm_head|wte|head\.weight")
_DERIVED = re.compile(r"slope_rate$|inv_freq$")  # computed, not trained
_LOGARITHM = re.compile(r"A_log$|dt_bias$")  # of a decay, and of a step
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
ALONE = math.log(30)  # from all other matrices, or from the only sibling
CLEAR, SLIGHT = math.log(4), math.log(1.5)  # from the siblings, beyond their own spread
PEAK, SEGMENT = 8.0, 8.0  # times the siblings'
MANY = 1 / 16  # of a tensor's pieces
LEAST_PEAK = 30.0  # peak by rms; normal numbers have 4 to 6
LEAST_TWIN = 64  # numbers: fewer may be equal by chance
SPANS, ERRORS, CONSTANT = 2.0, 5.0, 0.05  # of means: times their span, their standard error, their size


def judge(stats: Sequence[TensorStats], result: Result) -> None:
    """Warns or fails for each tensor with numbers that no checkpoint has, or that its siblings do
    not have: the tensors of the same shape and name, but for numbers of layers and experts."""
    groups = defaultdict(list)
    for each in stats:
        if _DERIVED.search(each.key) and not each.not_finite:
            continue
        groups[_NUMBER.sub("#", each.key), each.shape].append(each)
    matrices = [each for each in stats if _is_matrix(each) and each.rms]
    for group in groups.values():
        _judge_twins(group, result)
        for each in group:
            siblings = [other for other in group if other is not each]
            if each.not_finite:
                result.fail(f"{each.key}: {each.not_finite} of {each.count:,} numbers are not finite ({each.file})")
            elif each.is_number:
                _judge_zeros(each, siblings, result)
                if not _judge_scale(each, siblings, matrices, result):
                    _judge_mean(each, siblings, result)
                _judge_places(each, siblings, result)
            _judge_dtype(each, siblings, result)


def _is_matrix(each: TensorStats) -> bool:
    return len(each.shape) > 1 and each.is_number and not _TABLE.search(each.key)


def _gain(each: TensorStats) -> float:
    """Logarithm of the size of outputs for inputs of size 1."""
    return math.log(each.rms) + 0.5 * math.log(each.count / max(each.shape[0], 1))


def _judge_twins(group: Sequence[TensorStats], result: Result) -> None:
    """Warns of matrices that are equal, and of the one tensor that differs where all others are equal."""
    counts = Counter(each.sha256 for each in group if each.sha256)
    if len(counts) == 1 and len(group) > 2:
        return  # training has not changed them: all layers begin with the same numbers
    if sorted(counts.values())[:1] == [1] and len(counts) == 2 and len(group) > 3:
        odd = next(each for each in group if counts[each.sha256] == 1)
        others = [each for each in group if each is not odd]
        return result.warn(f"{odd.key} differs from {_named(others)}, which are equal to each other ({odd.file})")
    seen: dict[str, str] = {}
    for each in group:
        if not (_is_matrix(each) and each.rms and each.sha256 and each.count >= LEAST_TWIN):
            continue
        if each.sha256 in seen:
            result.warn(f"{each.key} equals {seen[each.sha256]} byte for byte: a layer may have been copied")
        seen.setdefault(each.sha256, each.key)


def _judge_zeros(each: TensorStats, siblings: Sequence[TensorStats], result: Result) -> None:
    others = sum(other.peak == 0 for other in siblings)
    if each.peak == 0 and others * 2 <= len(siblings):
        known = next((f", and {other.key} does not" for other in siblings if other.peak), "")
        if len(each.shape) > 1 or (len(siblings) > 1 and not others):
            result.fail(f"{each.key} holds zeros alone{known} ({each.file})")
        elif siblings:
            result.warn(f"{each.key} holds zeros alone{known} ({each.file})")
    elif each.zeros and len(each.segments) > 1 and _is_matrix(each) and not any(other.zeros for other in siblings):
        text = f"{each.key}: {each.zeros} of {len(each.segments)} pieces hold zeros alone ({each.file})"
        result.fail(text) if siblings and each.zeros > MANY * len(each.segments) else result.warn(text)


def _judge_scale(
    each: TensorStats, siblings: Sequence[TensorStats], matrices: Sequence[TensorStats], result: Result
) -> bool:
    """Whether its size was found to differ."""
    if not each.rms:
        return False
    sizes = [math.log(other.rms) for other in siblings if other.rms and not other.not_finite]
    if not sizes:
        if _is_matrix(each):
            _judge_alone(each, matrices, result)
        return False
    low, high = min(sizes), max(sizes)
    away = max(low - math.log(each.rms), math.log(each.rms) - high) - 2.0 / math.sqrt(each.count)
    spread = high - low
    text = (
        f"{each.key}: its numbers have size {each.rms:.3g}; those of {_named(siblings)} have {math.exp(low):.3g} to "
        f"{math.exp(high):.3g} ({each.file})"
    )
    clear = CLEAR + (2 if len(each.shape) > 1 else 4) * spread if len(sizes) > 1 else ALONE
    if away > clear and (len(sizes) > 1 or _is_matrix(each)):
        result.fail(text)
        return True
    if away > SLIGHT + spread and (len(sizes) > 1 or away > CLEAR):
        result.warn(text)
        return True
    return False


def _judge_mean(each: TensorStats, siblings: Sequence[TensorStats], result: Result) -> None:
    """Of a vector of logarithms: their mean tells what their size does not. Other vectors differ too much from
    layer to layer."""
    siblings = [other for other in siblings if other.peak and not other.not_finite]
    if not _LOGARITHM.search(each.key) or len(siblings) < 3:
        return
    low, high = min(other.mean for other in siblings), max(other.mean for other in siblings)
    error = median(_deviation(other) for other in siblings) / math.sqrt(each.count)
    usual = median(other.rms for other in siblings)
    away = max(low - each.mean, each.mean - high)
    if away > SPANS * (high - low) + ERRORS * error + CONSTANT * usual:
        result.warn(
            f"{each.key}: the mean of its numbers is {each.mean:.3g}; those of {_named(siblings)} have {low:.3g} to "
            f"{high:.3g} ({each.file})"
        )


def _deviation(each: TensorStats) -> float:
    return math.sqrt(max(each.rms**2 - each.mean**2, 0.0))


def _judge_alone(each: TensorStats, matrices: Sequence[TensorStats], result: Result) -> None:
    """Compares with all other matrices, and with those of the same module."""
    others = [other for other in matrices if other is not each]
    module = each.key.rsplit(".", 2)[0]
    own = [other for other in others if other.key.rsplit(".", 2)[0] == module]
    away, spread = _beyond(each, others) if len(others) > 2 else (0.0, 0.0)
    text = f"{each.key}: its numbers have size {each.rms:.3g}, {math.exp(away):.1f} times beyond those of "
    text, end = f"{text}all other matrices", f", by the width of their inputs ({each.file})"
    if away > min(ALONE, CLEAR + 2 * spread):
        return result.fail(text + end)
    if away > SLIGHT + spread:
        return result.warn(text + end)
    away, spread = _beyond(each, own) if len(own) > 1 else (0.0, 0.0)
    if away > CLEAR + spread:
        result.warn(f"{each.key}: its numbers are {math.exp(away):.1f} times beyond the others of {module}{end}")


def _beyond(each: TensorStats, others: Sequence[TensorStats]) -> tuple[float, float]:
    """Distance of a matrix from the range of others, and the width of that range, as logarithms."""
    gains = [_gain(other) for other in others]
    return max(min(gains) - _gain(each), _gain(each) - max(gains)), max(gains) - min(gains)


def _judge_places(each: TensorStats, siblings: Iterable[TensorStats], result: Result) -> None:
    if not each.rms:
        return
    siblings = [other for other in siblings if other.rms]
    peak, usual = each.peak / each.rms, max((other.peak / other.rms for other in siblings), default=math.inf)
    if peak > LEAST_PEAK and peak > PEAK * usual:
        result.warn(
            f"{each.key}: its largest number is {each.peak:.3g}, {peak:.0f} times the size of all; in "
            f"{_named(siblings)} {usual:.0f} times ({each.file})"
        )
    if not _is_matrix(each):
        return
    rough, usual = _roughness(each), max((_roughness(other) for other in siblings), default=math.inf)
    if rough > SEGMENT * usual:
        result.fail(
            f"{each.key}: a piece of it has numbers {rough:.0f} times as large as most; in {_named(siblings)} "
            f"{usual:.1f} times ({each.file})"
        )


def _roughness(each: TensorStats) -> float:
    middle = median(each.segments)
    return max(each.segments) / middle if middle else 1.0


def _judge_dtype(each: TensorStats, siblings: Sequence[TensorStats], result: Result) -> None:
    kinds = {other.dtype for other in siblings}
    if len(siblings) > 1 and len(kinds) == 1 and each.dtype not in kinds:
        result.warn(f"{each.key} is stored as {each.dtype}, and {_named(siblings)} as {kinds.pop()}")


def _named(siblings: Sequence[TensorStats]) -> str:
    first = siblings[0].key
    return first if len(siblings) == 1 else f"{first} and {len(siblings) - 1} more"
