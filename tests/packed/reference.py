"""What are packed words, in a few lines of NumPy? Written from the format's description, not from its code."""

import numpy as np


def unpack(memory: np.ndarray) -> np.ndarray:
    """uint8, (bytes,) to uint16, (words,)."""
    count, escaped = np.frombuffer(memory[16:24].tobytes(), dtype="<u4")
    groups = -(-int(count) // 128)
    body = memory[64 : 64 + 192 * groups].reshape(groups, 192)
    byte, codes = body[:, :128].astype(np.uint16), body[:, 128:]
    code = np.concatenate([codes & 15, codes >> 4], axis=1)
    exponent = memory[:16][code].astype(np.uint16)
    words = ((byte >> 7 << 15) | (exponent << 7) | (byte & 127)).reshape(-1)[: int(count)]
    escapes = np.frombuffer(memory[64 + 192 * groups :].tobytes(), dtype="<u4")
    assert len(escapes) == escaped
    places = escapes >> 8
    assert (np.diff(places.astype(np.int64)) > 0).all()
    assert (code.reshape(-1)[places] == 15).all()
    words[places] = (words[places] & 0x807F) | ((escapes & 255) << 7).astype(np.uint16)
    return words


def pack(words: np.ndarray) -> np.ndarray:
    """uint16, (words,) to uint8, with the exponents that are met most often; of the same number the lesser ones."""
    exponent = (words >> 7).astype(np.uint8)
    met = np.bincount(exponent, minlength=256)
    palette = np.argsort(-met, kind="stable")[:15].astype(np.uint8)
    table = np.full(256, 15, np.uint8)
    table[palette] = np.arange(15)
    groups = -(-len(words) // 128)
    padded = np.concatenate([words, np.repeat(words[-1:], groups * 128 - len(words))]).reshape(groups, 128)
    code = table[(padded >> 7).astype(np.uint8)]
    byte = ((padded >> 8 & 128) | (padded & 127)).astype(np.uint8)
    body = np.concatenate([byte, code[:, :64] | code[:, 64:] << 4], axis=1)
    places = np.flatnonzero(table[exponent] == 15).astype(np.uint32)
    header = np.zeros(64, np.uint8)
    header[:15] = palette
    header[16:24] = np.frombuffer(np.array([len(words), len(places)], "<u4").tobytes(), np.uint8)
    escapes = (places << 8 | exponent[places]).astype("<u4")
    return np.concatenate([header, body.reshape(-1), np.frombuffer(escapes.tobytes(), np.uint8)])
