"""How much room does an offloaded cache of keys and values take? One answer, for plans and runs."""

LAYERS_ON_DEVICE = 3  # at the same time: one is used, two are on their way
LAYERS_STAGED = 6  # at most, in host memory: on their way to disk or from there

_LEAST_TOKENS, _SHARE = 64, 8  # room for new tokens: so many, or an eighth of those that are there


def room_on_device(layer_bytes: int) -> int:
    """Bytes that plans leave for layers, of which the largest has `layer_bytes`.

    They are rounded up, so that runs make their plans anew only a few times while a cache grows.
    """
    step = 1 << max(layer_bytes.bit_length() - 4, 0)
    return LAYERS_ON_DEVICE * -(-layer_bytes // step) * step


def tokens_with_room(tokens: int) -> int:
    """For how many tokens memory is made where a cache of this many comes to rest."""
    return tokens + max(_LEAST_TOKENS, tokens // _SHARE)
