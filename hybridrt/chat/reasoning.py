"""How models mark their reasoning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Tokens of OpenAI's Harmony format.
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"


@dataclass(frozen=True)
class ReasoningTags:
    """Text between two tags.

    Attributes:
        opens: each begins the reasoning, at the beginning of an answer or at the prompt's end
            alone.
        closes: each ends it.
        markers: texts that a chat template of this format contains, all of them.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    markers: tuple[str, ...]

    def opened_by(self, prompt: str, continued: str = "") -> bool:
        """Whether a prompt ends within reasoning.

        Args:
            continued: the beginning of the answer at the prompt's end.
        """
        begun = continued.lstrip().startswith(self.opens) and not any(tag in continued for tag in self.closes)
        return begun or prompt.rstrip().endswith(self.opens)

    def closed_by(self, prompt: str) -> bool:
        """Whether a prompt's text ends after reasoning, so that the answer has none."""
        return prompt.rstrip().endswith(self.closes)


@dataclass(frozen=True)
class Channels(ReasoningTags):
    """Answers of messages with headers, which `hybridrt.chat.harmony` reads."""

    def opened_by(self, prompt: str, continued: str = "") -> bool:
        return prompt.rpartition(START)[2].partition(MESSAGE)[0].endswith(f"{CHANNEL}analysis") and self._inside(prompt)

    def closed_by(self, prompt: str) -> bool:
        """Whether a prompt ends within a message, which the answer continues."""
        return self._inside(prompt)

    def before_content(self, literals: Callable[[Sequence[str]], str], begun: bool, tokens: bool) -> str:
        """A grammar's rule for an answer up to its content.

        Args:
            literals: texts, or tags that may be tokens, as a rule writes them.
            begun: the prompt has opened the reasoning.
            tokens: tags are tokens. Else an answer has no reasoning, because text would hold them.
        """
        start, channel, message, end = (literals([tag]) for tag in (START, CHANNEL, MESSAGE, END))
        opened, next_one = f'{channel} "analysis" {message}', f'{end} {start} "assistant"'
        thought = f"TEXT {next_one}" if begun else f"({opened} TEXT {next_one})?" if tokens else ""
        return f'{thought} {channel} "final" {message}'

    @staticmethod
    def _inside(prompt: str) -> bool:
        last = prompt.rpartition(START)[2]
        return MESSAGE in last and END not in last


# DeepSeek-R1, Qwen 3 and 3.5, Nemotron, Falcon-H1R, LFM2-Thinking, LFM3, Ling, MiniMax.
THINK = ReasoningTags(("<think>",), ("</think>",), ("</think>",))
# ibm-granite/granite-3.2-8b-instruct: sentences instead of tags.
GRANITE = ReasoningTags(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    ("Here is my thought process:",),
)
# openai/gpt-oss-20b.
HARMONY = Channels((f"{CHANNEL}analysis{MESSAGE}",), (END,), (CHANNEL, MESSAGE, "analysis"))
