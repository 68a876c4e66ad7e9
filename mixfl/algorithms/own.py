"""Keys that only one algorithm has.

    @algorithm("fedprox", CLIENT_KEYS, settings={"mu": key(0.1, "pull to the server's model")})
    def fed_prox(problem, s):
        ... s.own.mu ...

They are set, checked, stored, listed and swept like all other keys. The type of a value is that of
its default, unless it is given: `key(0.1, "...", NotNegative)`.
"""

import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mixfl.errors import MixflError
from mixfl.settings import KEYS, Own, Settings
from mixfl.validation import Finite, check

TYPES = {float: Finite, int: int, bool: bool, str: str}
HEAD = ("task", "algorithm", "preset", "data", "version", "format", "own")  # of a config.toml


class OwnKeys(Mapping[str, Any]):
    """The fields that an algorithm declares, by name."""

    def __init__(self, fields: Mapping[str, Any] = MappingProxyType({}), of: str = ""):
        for name, field in fields.items():
            if not name.isidentifier() or name in KEYS or name in HEAD:
                taken = name in KEYS or name in HEAD
                raise MixflError(
                    f"algorithm '{of}': its setting '{name}' "
                    + ("is a key of every run" if taken else "is no name that Python could use")
                    + ": choose another name."
                )
            if "help" not in getattr(field, "metadata", {}):
                raise MixflError(
                    f"algorithm '{of}': expected {name} = key(default, \"its meaning\"), "
                    f"got {field!r}."
                )
            if "type" not in field.metadata and type(field.default) not in TYPES:
                raise MixflError(
                    f"algorithm '{of}': the default of '{name}' is {field.default!r}: give its "
                    "type as the third argument of key, or a number, a text, true or false."
                )
        self.fields = dict(fields)
        self.chosen({})  # the defaults, too, must be of their types

    def chosen(self, keys: Mapping[str, Any]) -> Own:
        """The values of a run, checked: the given ones, or the defaults."""
        return Own({name: self._checked(name, keys) for name in self.fields})

    def completed(self, s: Settings) -> Settings:
        """With the defaults of keys that the settings don't have."""
        if all(name in s.own for name in self.fields):
            return s
        with_own = copy.copy(s)  # not `replace`: settings of a traced round stay what they are
        object.__setattr__(with_own, "own", Own({**self.chosen(s.own), **s.own}))
        return with_own

    def _checked(self, name: str, keys: Mapping[str, Any]) -> Any:
        field = self.fields[name]
        type_ = field.metadata.get("type") or TYPES[type(field.default)]
        return check(name, keys.get(name, field.default), type_, field.metadata["help"])

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)
