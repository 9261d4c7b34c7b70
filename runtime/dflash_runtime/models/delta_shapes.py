"""The tensors of a recurrent layer by the gated delta rule, by name and shape. Needs no torch."""

from dflash_runtime.checkpoint.layout import Shape
from dflash_runtime.target_config import RecurrenceConfig

INPUTS = ("qkv", "b", "a", "z")
"""The projections of a layer's input: channels, beta, decay, gate of the norm."""


def delta_shapes(config: RecurrenceConfig, hidden_size: int) -> dict[str, Shape]:
    """Return the tensors of a recurrent layer, by their names in the layer."""
    heads, channels, values = config.num_value_heads, config.num_channels, config.values_width
    heights = dict(zip(INPUTS, (channels, heads, heads, values), strict=True))
    return {
        **{f"in_proj_{part}.weight": (height, hidden_size) for part, height in heights.items()},
        "conv1d.weight": (channels, 1, config.num_taps),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (config.value_size,),
        "out_proj.weight": (hidden_size, values),
    }
