"""YAML as people write settings in it: every key is a name and stands once, and nothing holds itself. Pure."""

from typing import IO, Any

import yaml

NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""What reading YAML raises: dates that are none are a ValueError."""
_MERGE = "tag:yaml.org,2002:merge"
MAX_DEPTH = 64
"""Of what holds what: settings need four, and a thousand brackets take the library a second."""


class RefusedError(ValueError):
    """It is YAML, and one of its keys would be lost or is no name, or it is nested too deeply."""


class _Loader(yaml.SafeLoader):
    """The library's, without its leniency towards keys."""

    def __init__(self, stream: IO[str] | str) -> None:
        super().__init__(stream)
        self.deep_construct = True  # an alias inside of what it stands for is then refused, not tied into a knot
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH and parent is not None:
            line = parent.start_mark.line + 1
            raise RefusedError(f"line {line}: got a value in more than {MAX_DEPTH} others; need fewer brackets")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise RefusedError(
                    f"line {line}: got the key {key!r:.50}, need a name; write it as text, or leave it out"
                )
            if key in lines:
                raise RefusedError(
                    f"line {line}: got {key} again, need it once; merge it with that of line {lines[key]}"
                )
            lines[key] = line
        return super().construct_mapping(node, deep)


def read_yaml(stream: IO[str] | str) -> Any:
    """Return what a file, or a value on the command line, holds.

    Raises:
        ValueError: it is not YAML, or not as settings are written; one line.
        UnicodeDecodeError: it is not text.
    """
    try:
        loader = _Loader(stream)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except (RefusedError, UnicodeDecodeError):
        raise
    except NOT_YAML as exc:
        raise ValueError(f"not YAML: {' '.join(str(exc).split())}") from exc
