"""Seeded inputs that are valid for each of the real models, by input name."""

from __future__ import annotations

import numpy as np


def feeds(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Return inputs for the model that fetch.py calls `name`; the same seed gives the same numbers."""
    random = np.random.default_rng(seed)

    def uniform(low: float, high: float, *shape: int) -> np.ndarray:
        return random.uniform(low, high, shape).astype(np.float32)

    if name.startswith("light-"):  # one picture, as the classifiers of ImageNet take it
        caffe2 = name in ("light-resnet50", "light-shufflenet", "light-zfnet512")  # the exporter that named the input
        return {"gpu_0/data_0" if caffe2 else "data_0": uniform(0, 1, 1, 3, 224, 224)}
    if name == "ocr-recogniser":  # one line of text, pixels in -1..1
        return {"x": uniform(-1, 1, 1, 3, 48, 320)}
    if name == "ocr-classifier":  # two pieces of text
        return {"x": uniform(-1, 1, 2, 3, 48, 192)}
    if name == "deepcut":  # 40 characters with their neighbours, and the class of each
        characters, classes = random.integers(0, 178, (40, 21)), random.integers(0, 12, (40, 21))
        return {"input_1": characters.astype(np.float32), "input_2": classes.astype(np.float32)}
    if name == "attacut":  # 30 characters and their syllables
        return {"input": np.stack((random.integers(0, 139, 30), random.integers(0, 6227, 30)))[None]}
    if name == "silero-vad-sequence":  # 20 windows of 32 ms at 16 kHz, each with 4 ms before it
        state = np.zeros((1, 1, 128), np.float32)
        return {"input": uniform(-1, 1, 20, 576), "h": state, "c": state}
    if name.startswith("silero-vad"):  # one such window
        values = {"input": uniform(-1, 1, 1, 576), "state": np.zeros((2, 1, 128), np.float32)}
        return values if name == "silero-vad-half" else values | {"sr": np.array(16000)}
    if name in ("ddddocr", "ddddocr-old"):  # one captcha in grey, 64 pixels high
        return {"input1": uniform(-1, 1, 1, 1, 64, 160)}
    if name == "ddddocr-det":  # one picture, pixels in 0..255
        return {"images": uniform(0, 255, 1, 3, 416, 416)}
    if name == "lac":  # two sentences of 12 tokens
        return {"token_ids": random.integers(0, 58224, (2, 12)), "length": np.array([12, 7])}
    if name == "minilm-int8":  # two sentences, the second one shorter
        tokens, mask = _tokens(random, 30522)
        return {"input_ids": tokens, "attention_mask": mask, "token_type_ids": np.zeros_like(mask)}
    if name in ("grammar-tagger", "title-encoder"):
        tokens, mask = _tokens(random, 28996 if name == "grammar-tagger" else 32100)
        return {"input_ids": tokens, "attention_mask": mask}
    if name == "title-decoder":  # a prefix of 6 tokens, and what the encoder says of 16
        _, mask = _tokens(random, 1)
        states = random.standard_normal((2, 16, 512)).astype(np.float32) / 4
        tokens = random.integers(0, 32100, (2, 6))
        return {"input_ids": tokens, "encoder_hidden_states": states, "encoder_attention_mask": mask}
    if name == "voice-embedder":  # two windows of 80 frames, 40 mel bands
        return {"mel_window": uniform(0, 2, 2, 80, 40)}
    if name == "name-encoder":  # two names, the second one shorter; True where there is no letter
        _, mask = _tokens(random, 1)
        return {"src": random.integers(30, 148, (2, 16)), "src_mask": mask == 0}
    if name == "name-decoder":  # a prefix of 4 letters, and what the encoder says of 16
        _, mask = _tokens(random, 1)
        memory, hidden = uniform(-1, 1, 2, 16, 256), uniform(-1, 1, 2, 2, 256)
        return {"prefix": random.integers(30, 148, (2, 4)), "memory": memory, "src_mask": mask == 0, "hidden": hidden}
    if name == "piper-voice":  # 20 phonemes; no noise, so that the sound is the same every time
        phonemes = random.integers(1, 150, (1, 20))
        return {"input": phonemes, "input_lengths": np.array([20]), "scales": np.array([0, 1, 0], np.float32)}
    if name == "wakeword-embedding":  # two windows of 76 frames, 32 mel bands
        return {"input_1": uniform(-2, 4, 2, 76, 32, 1)}
    if name == "wakeword":  # 16 embeddings
        return {"x.1": uniform(-10, 10, 1, 16, 96)}
    raise KeyError(name)


def _tokens(random: np.random.Generator, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Two sentences of 16 tokens, and which of them count: the second sentence is shorter."""
    mask = np.ones((2, 16), np.int64)
    mask[1, 9:] = 0
    return random.integers(0, vocabulary, mask.shape), mask
