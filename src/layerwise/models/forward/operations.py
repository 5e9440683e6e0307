"""What kinds of operations there are, as far as features are concerned."""

from __future__ import annotations

PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "mv": (0, 1), "addmv": (1, 2)}
"""Matrix products, with the places of their two operands."""
ENDS = frozenset({"linalg_solve_triangular", "triangular_solve", "linalg_solve_ex", "_linalg_solve_ex", "_cdist_forward", "_euclidean_dist", "dot", "vdot"})  # fmt: skip
"""What else reads whole operands of activations, as a product does."""
GROUPED_PRODUCTS = ("_grouped_mm", "_scaled_grouped_mm")
SUMS = frozenset({"add", "sub", "rsub", "add_", "sub_", "addcmul", "lerp"})
CHOICES = {"topk": 2, "argmax": 1, "argsort": 1, "sort": 1, "kthvalue": 2}
"""What lets features compete, with the place of the axis along which it does."""
ORDERS = frozenset({"sort", "argsort"})
"""Of these, what keeps all of them: who reads a part of the order chooses."""
NORMS = frozenset(
    {
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training",
        "cudnn_batch_norm",
        "_batch_norm_no_update",
        "_fused_rms_norm",
        "rms_norm",
    }
)
IN_PLACE_ORDER = frozenset(
    {
        "_softmax",
        "_log_softmax",
        "cumsum",
        "cumprod",
        "logcumsumexp",
        "cummax",
        "native_dropout",
        "tril",
        "triu",
        "nan_to_num",
        "renorm",
        "fft_fft",
        "_fft_c2c",
        "prelu",
        "_prelu_kernel",
        "rrelu_with_noise",
        "masked_fill",
        "masked_fill_",
        "masked_scatter",
        "where",
        "clamp",
        "hardtanh",
        "leaky_relu",
        "celu",
        "bernoulli",
        "softplus",
        "dropout",
    }
)
"""Each output is of the input in its place, and perhaps of its neighbours."""
COPIES = frozenset(
    {"clone", "_to_copy", "contiguous", "lift_fresh", "lift_fresh_copy", "alias", "detach", "_conj_physical"}
)
MOVES = frozenset(
    {
        "repeat",
        "roll",
        "flip",
        "rot90",
        "index_select",
        "_unsafe_view",
        "_reshape_copy",
        "view_copy",
        "expand_copy",
        "squeeze_copy",
        "slice_copy",
        "permute_copy",
        "transpose_copy",
        "t_copy",
        "unsqueeze_copy",
        "select_copy",
        "unfold_copy",
        "pixel_shuffle",
        "pixel_unshuffle",
        "channel_shuffle",
        "diagonal_copy",
        "take_along_dim",
    }
)
"""Elements change their places, and no value changes. Done to labels as to values."""
REDUCTIONS = frozenset(
    {
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "prod",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "norm",
        "linalg_vector_norm",
        "logsumexp",
        "any",
        "all",
        "median",
        "nansum",
    }
)
PER_CHANNEL = frozenset(
    {
        "max_pool1d_with_indices",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "adaptive_max_pool2d",
        "_adaptive_avg_pool2d",
        "_adaptive_avg_pool3d",
        "adaptive_avg_pool1d",
        "mean_pool",
        "replication_pad1d",
        "replication_pad2d",
        "replication_pad3d",
        "reflection_pad1d",
        "reflection_pad2d",
        "reflection_pad3d",
        "grid_sampler_2d",
        "grid_sampler_3d",
        "im2col",
    }
)
"""Of every channel by itself: what a channel is stays."""
WRITES = frozenset(
    {
        "index_add",
        "index_add_",
        "index_put",
        "index_put_",
        "_index_put_impl_",
        "index_copy",
        "index_copy_",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "scatter_reduce",
        "scatter_reduce_",
        "index_reduce_",
        "masked_scatter_",
        "slice_scatter",
        "select_scatter",
    }
)
"""Parts of another tensor are added or put into a first one."""
LOOKUPS = frozenset({"embedding", "_embedding_bag", "_embedding_bag_forward_only", "embedding_renorm_"})
NEITHER = frozenset({"is_same_size", "sym_size", "_assert_async", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros", "new_ones", "new_full", "_has_compatible_shallow_copy_type", "new_empty_strided", "randint_like"})  # fmt: skip
"""What reads no values."""


def is_attention(name: str) -> bool:
    return "scaled_dot_product" in name or name.startswith("_flash_attention")


def is_upsampling(name: str) -> bool:
    return name.startswith(("upsample_", "_upsample_"))
