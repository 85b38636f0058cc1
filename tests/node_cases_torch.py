"""PyTorch's autograd as the oracle of ONNX's node cases, entry by entry.

The gradient of a case with respect to all floating-point inputs is compared with that of PyTorch's
functions for the operator in float64, for inputs as ONNX ships them: nothing is moved, so kinks and
ties are compared too. Cases that expand an operator to others are compared with the operator
itself. PyTorch is imported when it is asked, since it may be missing.
"""

from __future__ import annotations

from typing import Any

import node_cases
import numpy as np
from node_cases import Arrays, NodeCase, Runner, by_name

TOLERANCES = {"float64": 1e-9, "float32": 3e-4, "float16": 4e-3, "bfloat16": 3e-2}
"""Of the greatest entry of a gradient. What rounds is the operator; most cases are far better."""

FLOOR = 1e-2  # smaller gradients are compared absolutely: 1 − tanh² has few digits left

INEXPRESSIBLE = by_name(
    {
        "F.fold takes images with two axes": "col2im_5d",
        "F.grid_sample sums neighbours, of which this form takes the maximum": "roialign_mode_max",
        "F.interpolate rounds to the nearest entry in other ways, where there are ties": """
            resize_downsample_scales_nearest resize_upsample_sizes_nearest
            resize_downsample_sizes_nearest resize_upsample_sizes_nearest_floor_align_corners
            resize_upsample_sizes_nearest_round_prefer_ceil_asymmetric
            resize_upsample_sizes_nearest_ceil_half_pixel
            resize_upsample_sizes_nearest_axes_2_3 resize_upsample_sizes_nearest_axes_3_2""",
        "F.interpolate repeats the border": """
            resize_upsample_scales_cubic_A_n0p5_exclude_outside
            resize_downsample_scales_cubic_A_n0p5_exclude_outside""",
        "F.interpolate with antialias leaves out what is beyond the border": """
            resize_downsample_scales_linear_antialias resize_downsample_sizes_linear_antialias
            resize_downsample_scales_cubic_antialias resize_downsample_sizes_cubic_antialias""",
        "F.interpolate has no such coordinates": """
            resize_upsample_scales_cubic_asymmetric
            resize_downsample_sizes_linear_pytorch_half_pixel
            resize_downsample_scales_linear_half_pixel_symmetric
            resize_upsample_scales_linear_half_pixel_symmetric""",
        "F.interpolate does not crop": """
            resize_tf_crop_and_resize resize_tf_crop_and_resize_extrapolation_value
            resize_tf_crop_and_resize_axes_2_3 resize_tf_crop_and_resize_axes_3_2""",
        "F.interpolate does not keep the aspect ratio": """
            resize_upsample_sizes_nearest_not_larger resize_upsample_sizes_nearest_not_smaller
            resize_downsample_sizes_nearest_not_larger
            resize_downsample_sizes_nearest_not_smaller""",
    }
)
"""Cases of a form that PyTorch's function for the operator does not have."""

OTHERWISE = by_name(
    {
        "at a kink, where what it expands to is another choice than the operator's": """
            elu_example_expanded_ver18 selu_example_expanded_ver18 leakyrelu_example_expanded""",
        "zeros have no direction: the operator gives 0, F.normalize divides by 1e-12": """
            l2normalization_axis_0""",
        "samples lie on pixels, where another formula than F.grid_sample's rounds otherwise": """
            roialign_aligned_false""",
    }
)
"""Cases that are compared with inputs that are moved a little, and why."""

MASKED_ROWS = """
    attention_causal_boolmask_nan_robustness_expanded
    attention_23_boolmask_fullymasked_row_nan_robustness_expanded
    attention_4d_causal_nonpad_negative_offset_structural_empty_expanded
    attention_23_fullymasked_qk_matmul_output_mode3_zero_expanded
    attention_24_fullymasked_qk_matmul_output_mode3_zero_expanded
    attention_24_qk_matmul_output_mode3_softmax_precision_expanded
    attention_local_window_gqa_rank4_mask_expanded"""
"""Cases of which some rows are masked entirely, written out as a Softmax."""

NOT_COMPARED = by_name(
    {
        "Softmax of a row of −∞ is NaN, and so is its derivative; see Attention": MASKED_ROWS,
        "the scores shown are −∞ plus the mask, or −∞ in its place; Attention is compared": """
            attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal_expanded
            attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal_expanded""",
        "the derivative with respect to an infinite modulus is NaN; PyTorch gives the quotient": """
            mod_float_edge_cases_fmod_0_float16 mod_float_edge_cases_fmod_0_float32
            mod_float_edge_cases_fmod_0_float64""",
    }
)
"""Cases that PyTorch cannot judge, and why."""

NO_FUNCTION = {
    "LinearAttention": "the reference implementation judges",
    "MelWeightMatrix": "its gradient is zero",
}
"""Operators that PyTorch has no function for, and why that is no loss."""


def by_torch(
    case: NodeCase, feeds: Arrays, weights: Arrays, mask: np.ndarray | None
) -> tuple[Arrays, Arrays]:
    """Returns the outputs and the gradients of a case, and a Dropout's for a mask."""
    import torch
    import torch_operators

    values = {name: torch_operators.constant(array) for name, array in feeds.items()}
    for name in case.differentiated:
        values[name].requires_grad_()
    extra = {} if mask is None else {"mask": torch.from_numpy(mask)}
    outputs: dict[str, Any] = {}
    for name, value in torch_operators.evaluate(case.graph, values, **extra).items():
        if isinstance(value, list):
            outputs.update((f"{name}_{index}", part) for index, part in enumerate(value))
        else:
            outputs[name] = value
    xs = [values[name] for name in case.differentiated]
    y = sum(
        (outputs[name.removeprefix("weight_")] * torch.from_numpy(weight)).sum()
        for name, weight in weights.items()
    )
    found = [None] * len(xs)
    if y.requires_grad:
        found = torch.autograd.grad(y, xs, allow_unused=True)
    gradients = {
        name: np.zeros(x.shape) if gradient is None else gradient.numpy()
        for name, x, gradient in zip(case.differentiated, xs, found, strict=True)
    }
    return {n: o.detach().numpy() for n, o in outputs.items() if o is not None}, gradients


def draws(case: NodeCase) -> bool:
    """Returns whether a case has a mask that only the runtime knows."""
    return case.op_type == "Dropout" and not case.expanded


def compare(runner: Runner) -> None:
    """Compares the outputs and the gradients of a case."""
    case = runner.case
    feeds = node_cases.moved(case) if case.name in OTHERWISE else case.feeds
    weights = runner.weights(runner.outputs(feeds))
    found, gradients = runner.gradients(feeds, weights)
    masks = [array for array in found.values() if draws(case) and array.dtype == bool]
    expected, expected_gradients = by_torch(case, feeds, weights, masks[0] if masks else None)
    for name, array in found.items():
        if f"weight_{name}" in weights:
            size = np.abs(array[np.isfinite(array)]).max(initial=1e-3)
            np.testing.assert_allclose(
                array, expected[name], rtol=1e-2, atol=1e-4 * size, err_msg=f"{case.name} {name}"
            )
    for name, gradient in gradients.items():
        right = expected_gradients[name]
        assert gradient.shape == right.shape, case.name
        size = np.abs(right[np.isfinite(right)]).max(initial=FLOOR)
        np.testing.assert_allclose(
            gradient.astype(np.float64),
            right,
            rtol=0,
            atol=TOLERANCES[node_cases.narrowest(case, name)] * size,
            err_msg=f"{case.name}, gradient of {name}",
        )
