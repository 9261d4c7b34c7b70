"""The rope of a draft or target, and the check of a count, which all configs use."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_runtime.errors import InvalidConfig
from dflash_runtime.json_values import is_int, is_number


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """A rotary embedding in canonical form. `params` has the other keys of its kind, such as factor or beta_fast."""

    theta: float
    kind: str = "default"
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_number(self.theta) or not self.theta > 0:
            raise InvalidConfig("rope_theta", self.theta, "a positive number")

    def to_parameters(self) -> dict[str, Any]:
        """The `rope_parameters` dictionary of transformers 5."""
        return {"rope_theta": self.theta, "rope_type": self.kind, **self.params}


PUBLISHED = {
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
}  # fmt: skip
"""Our field -> its key in published configs, which errors name."""


def require_count(name: str, value: object, minimum: int = 1) -> None:
    """Refuse a count below the minimum. `name` is our field.

    Raises:
        InvalidConfig: names the key of published configs.
    """
    name = PUBLISHED.get(name, name)
    if not is_int(value) or value < minimum:
        raise InvalidConfig(name, value, f"an integer of at least {minimum}")
