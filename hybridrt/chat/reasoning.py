"""How models mark their reasoning."""

from dataclasses import dataclass


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


# DeepSeek-R1, Qwen 3 and 3.5, Nemotron, Falcon-H1R, LFM2-Thinking, LFM3, Ling, MiniMax.
THINK = ReasoningTags(("<think>",), ("</think>",), ("</think>",))
# ibm-granite/granite-3.2-8b-instruct: sentences instead of tags.
GRANITE = ReasoningTags(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    ("Here is my thought process:",),
)
