"""Steps that were not taken: who hears of them, and when they are too many."""

from __future__ import annotations

from layerwise.errors import StateError, warn

_MANY = 10
"""After how many skipped steps in a row a user hears of it again."""


class Skips:
    """Skipped steps in a row. A run that skips them all looks as if it went on: schedulers do."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._in_a_row = 0
        self._has_told = False

    def note(self, step: int, reason: str, *, overflow: bool, aloud: bool) -> None:
        """A step was taken, or skipped for this reason. `overflow` is the one that loss scaling finds its scale by: worth a
        word only if it does not end."""
        if not reason:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        count = self._in_a_row
        if self._most is not None and count > self._most:
            raise StateError(
                f"{count} steps in a row were skipped, max_skipped={self._most}: {reason}. Nothing was changed by any of them. Look "
                "at the loss and the data of these steps, or lower the learning rate."
            )
        if (not self._has_told and not overflow) or count == _MANY:
            self._has_told = True
            many = f"{count} steps in a row were skipped" if count > 1 else f"step {step} was skipped"
            warn(
                f"{many}: {reason}. Weights and optimizer state stay as they are; see optimizer.stats, and GradientPolicy(max_skipped=) to "
                "raise instead.",
                aloud=aloud,
            )
