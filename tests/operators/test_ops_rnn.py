"""LSTM, GRU and RNN: onnx's own node tests, then every option against onnxruntime, in NumPy and in MLX."""

from __future__ import annotations

import numpy as np
import pytest
from backend_cases import against_onnxruntime, cases, check, single
from places import place  # noqa: F401 - a fixture

from lut4tool.runtime.session import Runtime

pytestmark = pytest.mark.usefixtures("place")

RNG = np.random.default_rng(11)
STEPS, BATCH, INPUT, HIDDEN = 5, 3, 4, 6
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@pytest.mark.parametrize("case", cases("rnn"))
def test_node(case):
    check(case)


def floats(*shape: int) -> np.ndarray:
    return RNG.uniform(-1, 1, shape).astype(np.float32)


def inputs(
    op_type: str,
    directions: int,
    *,
    bias: bool = True,
    lengths: bool = False,
    initial: bool = False,
    peephole: bool = False,
) -> list:
    """The inputs of a cell in their order, None for the absent ones."""
    gates = GATES[op_type] * HIDDEN
    found = [floats(STEPS, BATCH, INPUT), floats(directions, gates, INPUT), floats(directions, gates, HIDDEN)]
    found += [floats(directions, 2 * gates) if bias else None, np.array([5, 1, 3], np.int32) if lengths else None]
    states = 2 if op_type == "LSTM" else 1
    found += [floats(directions, BATCH, HIDDEN) if initial else None for _ in range(states)]
    found += [floats(directions, 3 * HIDDEN)] if peephole else []
    return found


def compare(op_type: str, given: list, version: int = 14, **attributes: object) -> None:
    outputs = 3 if op_type == "LSTM" else 2
    against_onnxruntime(
        op_type, version, given, outputs=outputs, rtol=1e-4, atol=1e-5, hidden_size=HIDDEN, **attributes
    )


@pytest.mark.parametrize("op_type", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_directions_lengths_and_states(op_type, direction, lengths, initial, bias):
    directions = 2 if direction == "bidirectional" else 1
    given = inputs(op_type, directions, bias=bias, lengths=lengths, initial=initial)
    compare(op_type, given, direction=direction)


@pytest.mark.parametrize("op_type", GATES)
@pytest.mark.parametrize("clip", [{}, {"clip": 3.0}])
def test_what_is_not_a_number_past_an_end_is_not_read(op_type, clip):
    given = inputs(op_type, 1, lengths=True)
    given[0][1:, 1] = np.nan
    compare(op_type, given, **clip)


@pytest.mark.parametrize("version", [7, 14, 22])
@pytest.mark.parametrize("op_type", GATES)
def test_versions(op_type, version):
    compare(op_type, inputs(op_type, 1), version)


@pytest.mark.parametrize("op_type", GATES)
@pytest.mark.parametrize("clip", [0.1, 0.5])
def test_clip(op_type, clip):
    compare(op_type, inputs(op_type, 2), direction="bidirectional", clip=clip)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_peepholes(direction, clip):
    directions = 2 if direction == "bidirectional" else 1
    given = inputs("LSTM", directions, initial=True, peephole=True)
    compare("LSTM", given, direction=direction, **({} if clip is None else {"clip": clip}))


@pytest.mark.parametrize("peephole", [False, True])
def test_input_forget(peephole):
    compare("LSTM", inputs("LSTM", 1, initial=True, peephole=peephole), input_forget=1)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("lengths", [False, True])
def test_linear_before_reset(direction, lengths):
    given = inputs("GRU", 2 if direction == "bidirectional" else 1, lengths=lengths, initial=True)
    compare("GRU", given, direction=direction, linear_before_reset=1)


@pytest.mark.parametrize("name", ["Relu", "Tanh", "Sigmoid", "LeakyRelu", "HardSigmoid", "Elu", "Softsign", "Softplus"])
def test_activations_with_their_defaults(name):
    compare("RNN", inputs("RNN", 1), activations=[name])


@pytest.mark.parametrize("name", ["Affine", "ThresholdedRelu", "ScaledTanh"])
def test_activations_for_which_onnxruntime_has_no_default(name):
    compare("RNN", inputs("RNN", 1), activations=[name], activation_alpha=[0.4], activation_beta=[0.7])


def test_alphas_and_betas_go_to_the_activations_that_take_them():
    compare(
        "LSTM", inputs("LSTM", 2), direction="bidirectional",
        activations=["HardSigmoid", "ScaledTanh", "Tanh", "Sigmoid", "LeakyRelu", "Affine"],
        activation_alpha=[0.3, 0.8, 0.1, 0.9], activation_beta=[0.4, 1.2, 0.05],
    )  # fmt: skip


@pytest.mark.parametrize("op_type", GATES)
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_layout_puts_the_batch_first(op_type, direction):
    """Against layout 0 with the axes moved: onnxruntime has layout 0 only."""
    given = inputs(op_type, 2 if direction == "bidirectional" else 1, initial=True)
    moved = [data if index in (1, 2, 3) or data is None else data.swapaxes(0, 1) for index, data in enumerate(given)]
    results = []
    for layout, values in enumerate((given, moved)):
        model = single(
            op_type,
            14,
            values,
            {"hidden_size": HIDDEN, "layout": layout, "direction": direction},
            3 if op_type == "LSTM" else 2,
        )
        results.append(Runtime(model).run(None, {f"x{i}": data for i, data in enumerate(values) if data is not None}))
    plain, batched = results
    np.testing.assert_array_equal(batched[0], plain[0].transpose(2, 0, 1, 3))
    for one, other in zip(batched[1:], plain[1:], strict=True):
        np.testing.assert_array_equal(one, other.swapaxes(0, 1))


@pytest.mark.parametrize("op_type", GATES)
def test_float64_is_computed_in_float64(op_type):
    given = [data.astype(np.float64) if data is not None else None for data in inputs(op_type, 1)]
    narrow = [data.astype(np.float32) if data is not None else None for data in given]
    runs = []
    for values in (given, narrow):
        model = single(op_type, 14, values, {"hidden_size": HIDDEN}, 1)
        runs.append(Runtime(model).run(None, {f"x{i}": data for i, data in enumerate(values) if data is not None})[0])
    assert runs[0].dtype == np.float64
    assert np.abs(runs[0] - runs[0].astype(np.float32)).max() > 0
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-4, atol=1e-5)
