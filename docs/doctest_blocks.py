"""For the Python reference: the `>>>` examples of docstrings become code blocks."""

import re

from griffe import Extension, Object


class DoctestBlocks(Extension):
    """Puts a fence around each run of lines that starts with `>>>`."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        """Runs after a class, function or module was read."""
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"((?:^>>> .*\n?)(?:^\S.*\n?)*)", r"```pycon\n\1\n```\n", obj.docstring.value, flags=re.M
            )
