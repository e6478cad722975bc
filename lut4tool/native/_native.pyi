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
def watch_pages(pages: np.ndarray) -> int: ...
def forget_pages(number: int) -> None: ...
def lost_pages(number: int) -> bool: ...
def instruction_set() -> str: ...
def use_instruction_set(name: str) -> None: ...
def product_instruction_set() -> str: ...
def lookup4_matrix(
    packed: np.ndarray,
    scales: np.ndarray,
    codebook: np.ndarray,
    rows: int,
    cols: int,
    block_size: int,
    along_k: bool,
    high_nibble_first: bool,
    rounding: str,
) -> Matrix: ...
def qmm_matrix(
    packed: np.ndarray, scales: np.ndarray, zero_points: np.ndarray, N: int, K: int, block_size: int
) -> Matrix: ...

class Matrix:
    def serves_gemv(self) -> bool: ...
    def kernel(self, M: int) -> str: ...
    def multiply(self, x: np.ndarray, y: np.ndarray, kernel: str = "", threads: int = 1) -> str: ...
