"""Which choice of a chat completion an output belongs to, and when that choice has ended. Pure.

The words and the sound of an answer are one choice. Every other final stage, such as one that draws, has a choice of
its own. Choices are numbered as they appear; where several answers are asked for, each has its words' number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from hub.request.outputs import OmniOutput

#: Modalities that share one choice.
SPOKEN = ("text", "audio")
#: The key of that choice; the others have their stage's id.
_WORDS = -1


@dataclass(slots=True)
class Choice:
    """One choice, as far as it has come."""

    index: int
    #: Whether it holds words and their sound.
    is_spoken: bool
    #: Whether the client has seen anything of it.
    is_shown: bool = False
    #: Why each of its modalities has ended.
    ends: dict[str, str] = field(default_factory=dict)
    is_over: bool = False
    #: The modality of what came last.
    modality: str = "text"

    @property
    def finish_reason(self) -> str:
        """Why it has ended: what ended the words, if there are any."""
        return next((self.ends[each] for each in SPOKEN if each in self.ends), next(iter(self.ends.values()), "stop"))


class Choices:
    """The choices of ``answers`` requests. ``modalities`` are those that come, of text and audio."""

    def __init__(self, modalities: Collection[str], answers: int = 1) -> None:
        self._expected = {each for each in SPOKEN if each in modalities}
        #: By the request's number and the stage, or _WORDS.
        self._choices: dict[tuple[int, int], Choice] = {}
        #: The stage whose words, and the one whose sound, share a choice: the first of each.
        self._spoken: dict[str, int] = {}
        if answers > 1 and self._expected:
            for number in range(answers):
                self._choices[number, _WORDS] = Choice(number, is_spoken=True)

    def __iter__(self) -> Iterator[Choice]:
        return iter(sorted(self._choices.values(), key=lambda choice: choice.index))

    @property
    def expects_sound(self) -> bool:
        """Whether sound is to come."""
        return "audio" in self._expected

    def find(self, number: int, output: OmniOutput) -> Choice | None:
        """The choice of an output of the request with this number; None if it belongs to none."""
        is_spoken = output.modality in SPOKEN
        if is_spoken:
            is_spoken = self._spoken.setdefault(output.modality, output.stage_id) == output.stage_id
        key = number, _WORDS if is_spoken else output.stage_id
        if key not in self._choices:
            # A stage that ends without a picture or sound is no choice; an empty text is one.
            if not (output.text or output.data or output.modality == "text"):
                return None
            self._choices[key] = Choice(len(self._choices), is_spoken)
        choice = self._choices[key]
        choice.modality = output.modality
        return choice

    def note_end(self, choice: Choice, output: OmniOutput) -> bool:
        """Take in that a stage has ended, if it has; return whether its choice has ended by that."""
        if output.finish_reason is None:
            return False
        choice.ends[output.modality] = output.finish_reason
        if choice.is_over or (choice.is_spoken and not choice.ends.keys() >= self._expected):
            return False
        choice.is_over = True
        return True

    def end_all(self, number: int) -> list[Choice]:
        """The request has ended: its choices that had not, which end now."""
        late = [choice for (each, _), choice in self._choices.items() if each == number and not choice.is_over]
        for choice in late:
            choice.is_over = True
        return late
