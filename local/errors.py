"""What went wrong with the embedded stack, told to the person who started it."""


class StackError(Exception):
    """A start, or a run, that cannot go on: what happened, what it means, and what to do about it."""

    def __init__(self, happened: str, *, means: str, remedy: str) -> None:
        super().__init__(f"{happened}\n  What it means: {means}\n  What to do: {remedy}")
