"""Seeded inputs that are valid for each of the real models, by input name."""

from __future__ import annotations

import numpy as np


def feeds(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Return inputs for the model that fetch.py calls `name`; the same seed gives the same numbers."""
    random = np.random.default_rng(seed)
    if name == "ocr-recogniser":  # one line of text, pixels in -1..1
        return {"x": random.uniform(-1, 1, (1, 3, 48, 320)).astype(np.float32)}
    if name == "deepcut":  # 40 characters with their neighbours, and the class of each
        characters, classes = random.integers(0, 178, (40, 21)), random.integers(0, 12, (40, 21))
        return {"input_1": characters.astype(np.float32), "input_2": classes.astype(np.float32)}
    if name == "attacut":  # 30 characters and their syllables
        return {"input": np.stack((random.integers(0, 139, 30), random.integers(0, 6227, 30)))[None]}
    if name == "silero-vad":  # 32 ms at 16 kHz with 4 ms before them
        sound = random.uniform(-1, 1, (1, 576)).astype(np.float32)
        return {"input": sound, "state": np.zeros((2, 1, 128), np.float32), "sr": np.array(16000)}
    if name == "lac":  # two sentences of 12 tokens
        return {"token_ids": random.integers(0, 58224, (2, 12)), "length": np.array([12, 7])}
    if name == "ddddocr-det":  # one picture, pixels in 0..255
        return {"images": random.uniform(0, 255, (1, 3, 416, 416)).astype(np.float32)}
    if name == "minilm-int8":  # two sentences, the second one shorter
        mask = np.ones((2, 16), np.int64)
        mask[1, 9:] = 0
        tokens = random.integers(0, 30522, (2, 16))
        return {"input_ids": tokens, "attention_mask": mask, "token_type_ids": np.zeros_like(mask)}
    raise KeyError(name)
