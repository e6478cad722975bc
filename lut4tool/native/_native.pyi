import numpy as np

def decode_elements(
    packed: np.ndarray,
    scales: np.ndarray,
    codebook: np.ndarray,
    block_size: int,
    high_nibble_first: bool,
    out: np.ndarray,
    threads: int = 1,
) -> None: ...
def decode_qmm(
    packed: np.ndarray,
    scales: np.ndarray,
    zero_points: np.ndarray,
    rows: int,
    K: int,
    block_size: int,
    out: np.ndarray,
    threads: int = 1,
) -> None: ...
def instruction_set() -> str: ...
def use_instruction_set(name: str) -> None: ...
