"""The words that the standard's text allows for attributes which are strings; its schemas do not list them."""

from __future__ import annotations

_AUTO_PAD = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_DIRECTION = ("forward", "reverse", "bidirectional")
_REDUCTION = ("none", "add", "mul", "max", "min")
_LOSS = ("none", "mean", "sum")
_TRANSFORM = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
_KERNEL = ("LINEAR", "POLY", "RBF", "SIGMOID")

#: Operator and attribute -> the words.
CHOICES: dict[tuple[str, str], tuple[str, ...]] = {
    **{
        (name, "auto_pad"): _AUTO_PAD
        for name in (
            "AveragePool", "Conv", "ConvInteger", "ConvTranspose", "LpPool", "MaxPool", "QLinearConv",
        )
    },
    **{(name, "direction"): _DIRECTION for name in ("GRU", "LSTM", "RNN")},
    **{(name, "reduction"): _REDUCTION for name in ("ScatterElements", "ScatterND")},
    **{(name, "reduction"): _LOSS for name in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")},
    **{
        (name, "post_transform"): _TRANSFORM
        for name in (
            "LinearClassifier", "LinearRegressor", "SVMClassifier", "SVMRegressor", "TreeEnsembleClassifier",
            "TreeEnsembleRegressor",
        )
    },
    **{(name, "kernel_type"): _KERNEL for name in ("SVMClassifier", "SVMRegressor")},
    ("BitShift", "direction"): ("LEFT", "RIGHT"),
    **{(name, "round_mode"): ("up", "down", "nearest") for name in ("Cast", "CastLike")},
    ("CastMap", "cast_to"): ("TO_FLOAT", "TO_STRING", "TO_INT64"),
    ("CastMap", "map_form"): ("DENSE", "SPARSE"),
    ("CausalConvWithState", "activation"): ("none", "silu", "swish"),
    ("DepthToSpace", "mode"): ("DCR", "CRD"),
    ("Gelu", "approximate"): ("none", "tanh"),
    ("GridSample", "mode"): ("linear", "nearest", "cubic", "bilinear", "bicubic"),
    ("GridSample", "padding_mode"): ("zeros", "border", "reflection"),
    ("ImageDecoder", "pixel_format"): ("RGB", "BGR", "Grayscale"),
    ("Momentum", "mode"): ("standard", "nesterov"),
    ("Normalizer", "norm"): ("MAX", "L1", "L2"),
    ("Pad", "mode"): ("constant", "reflect", "edge", "wrap"),
    ("Resize", "coordinate_transformation_mode"): (
        "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric",
        "tf_crop_and_resize", "tf_half_pixel_for_nn",
    ),
    ("Resize", "keep_aspect_ratio_policy"): ("stretch", "not_larger", "not_smaller"),
    ("Resize", "mode"): ("nearest", "linear", "cubic"),
    ("Resize", "nearest_mode"): ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    ("RoiAlign", "coordinate_transformation_mode"): ("half_pixel", "output_half_pixel"),
    ("RoiAlign", "mode"): ("avg", "max"),
    ("StringNormalizer", "case_change_action"): ("NONE", "LOWER", "UPPER"),
    ("TensorScatter", "mode"): ("linear", "circular"),
    ("TfIdfVectorizer", "mode"): ("TF", "IDF", "TFIDF"),
    ("TreeEnsembleRegressor", "aggregate_function"): ("AVERAGE", "SUM", "MIN", "MAX"),
    ("Upsample", "mode"): ("nearest", "linear", "bilinear"),
}  # fmt: skip
