"""What the loop tells its observers."""

import contextlib

from labcode.train.step import Step


class Observer:
    """Watches a run. All ranks have the same observers, and the loop tells them in order.

    Each method does nothing here; an observer overrides those that it needs.
    """

    def begin(self) -> str:
        """Before the first step. Returns why the run stops at once; "" if it does not."""
        return ""

    def during(self, number: int) -> contextlib.AbstractContextManager[object]:
        """Around a step.

        Args:
            number: The number of the step, from 1.
        """
        del number
        return contextlib.nullcontext()

    def after(self, step: Step) -> str:
        """After a step. Returns why the run stops here; "" if it does not."""
        del step
        return ""

    def end(self) -> None:
        """After the last step that is done, whatever the reason; also after an error."""

    def finish(self) -> None:
        """The run has done all its steps."""

    def close(self) -> None:
        """Close the files; what was written stays."""
