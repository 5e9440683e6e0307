"""Which calls a rank has made since its last step: what tells a `step()` too many from a rank that had no batch.

Ranks meet in `step()`. One that calls it once more than the others meets their next one, has no gradients in it, and from then on
brings all of its own one step late. Counts of steps are equal whenever ranks meet, so they tell nothing. What differs is
what lies between two steps: the others have called `zero_grad()` there, as their loop does, and this rank has not.
"""

from __future__ import annotations


class Calls:
    """The calls of one rank between two steps. `forward()` and `zero_grad()` note themselves here."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing is known of what was called before: a step has failed, or there was none."""
        self.has_run = self.has_zeroed = False
        """Whether there was a forward, and a `zero_grad()`, since the last step."""
        self._was_idle = self._is_known = False

    def is_odd(self, *, has_gradients: bool) -> bool:
        """Whether a step that comes now follows another one with nothing in between, or such a one with no `zero_grad()` in
        between. It is one too many if other ranks did call that; where a loop has none, no rank does."""
        return self._is_known and not self.has_zeroed and (self._was_idle or not (self.has_run or has_gradients))

    def stepped(self, *, has_gradients: bool) -> None:
        """A step has ended."""
        self._was_idle = self._is_known and not (self.has_run or has_gradients)
        self._is_known = True
        self.has_run = self.has_zeroed = False
