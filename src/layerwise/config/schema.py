"""What a user of `layerwise train` can set.

Every section is a frozen record of what was written. What the trainer computes from it is another type, in
`config/resolve.py`, so nothing is ever written back into a config.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from layerwise.config.layouts import Layout
from layerwise.config.rules import NsDtype, Scale, TpMode, WeightDecayMode

BYTE_VALUES = 256
"""Tokens are bytes, so this many rows of the embedding are ever read."""

STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGXCPU")
"""Signals that may ask a run to stop: terminals, schedulers and people send them, and a process can catch them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The GPT: pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU MLP, or experts."""

    d_model: int = 256
    """Width of the residual stream."""

    n_layers: int = 6
    """Number of blocks."""

    n_heads: int = 4
    """Query heads."""

    n_kv_heads: int = 2
    """Key and value heads; each serves n_heads / n_kv_heads query heads."""

    head_dim: int | None = None
    """Width of one head, an even number. none: d_model / n_heads."""

    hidden: int | None = None
    """Width of the MLP. none: 8/3 * d_model rounded up to a multiple of 32, which has the size of a plain 4x MLP."""

    vocab_size: int = BYTE_VALUES
    """Rows of the embedding. Tokens are bytes, so 256 are read; more rows are padding."""

    seq_len: int = 256
    """Bytes in one training sequence."""

    tie_embeddings: bool = False
    """Use the embedding as the output head too."""

    fuse_gate_up: bool = True
    """Keep the MLP's gate and up projections in one weight of two row blocks. Experts always do."""

    n_experts: int = 0
    """Experts of a block, of which each token passes through a few. 0: every block has one MLP for all tokens."""

    top_k: int = 2
    """Experts that each token passes through."""

    expert_hidden: int | None = None
    """Width of one expert. none: hidden / top_k rounded up to a multiple of 32: for each token as much as an MLP."""

    moe_every: int = 1
    """Every how many blocks one has experts; with 2 the second, the fourth and so on."""

    router_penalty: float = 0.01
    """Weight of the load-balancing loss, which is 1 at equal loads. It is not part of the loss that is logged."""

    rope_base: float = 10_000.0
    """Longest wavelength of the rotary embedding, in positions, divided by 2 pi."""

    norm_eps: float = 1e-5
    """Added to the mean square inside RMSNorm."""

    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections get it divided by sqrt(2 * n_layers)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the text comes from."""

    path: str = ""
    """A text file, or a folder whose files are joined in name order. Empty: the source of Python's standard library."""

    val_fraction: float = 0.05
    """The last part of the text, kept for validation."""

    seed: int = 0
    """Decides the order of training samples, together with the sample's number and nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Two update rules: one for the matrices of linear layers, one for everything else."""

    rule: Literal["muon", "normuon", "adamuon", "adamw"] = "muon"
    """Rule of the matrices. adamw: no orthogonalisation anywhere, the usual baseline."""

    lr: float = 5e-3
    """Learning rate of the matrices."""

    momentum: float = 0.95
    """mu of the moving average of gradients, which Muon and its kin orthogonalise."""

    nesterov: bool = True
    """Orthogonalise (1-mu)*G + mu*M instead of M."""

    beta2: float = 0.95
    """Decay of the second moment that normuon and adamuon keep; others ignore it."""

    weight_decay: float = 0.1
    """Weight decay of the matrices."""

    weight_decay_mode: WeightDecayMode = "decoupled"
    """decoupled: W *= 1 - lr*wd. independent: W *= 1 - wd. coupled: G += wd*W. For both rules."""

    coefficients: str = "polar_express"
    """Name of the Newton-Schulz coefficient set."""

    ns_steps: int = 5
    """Newton-Schulz steps."""

    scale: Scale = "rms"
    """Update scale by shape. rms: 0.2*sqrt(max), spectral: sqrt(max), shape: sqrt(max(1, M/N)), unit_rms: sqrt(M/N)."""

    extra_scale: float = 1.0
    """A constant on top of scale."""

    ns_dtype: NsDtype = "bf16"
    """Working dtype of Newton-Schulz."""

    tp_mode: TpMode = "auto"
    """Matrices that tensor parallelism has cut. auto: orthogonalised whole. blockwise: each rank's block by itself."""

    other_rule: Literal["adamw", "lion"] = "adamw"
    """Rule of embeddings, output head, norms and biases."""

    other_lr: float = 3e-3
    """Learning rate of the other params."""

    other_weight_decay: float = 0.0
    """Weight decay of the other params."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decays of AdamW's moments (or Lion's interpolation and momentum), wherever that rule is used."""

    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""

    clip_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm. none: no clipping."""

    qk_clip: float | None = None
    """Heads with larger attention logits get their query and key weights scaled down to it (MuonClip). none: off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingConfig:
    """Which params are matrices, where the defaults are not what you want."""

    rules_file: str = ""
    """TOML file with [[rule]] tables, which come before the default rules. Empty: the defaults alone."""

    strict: bool = False
    """Refuse to train when only a fallback rule explains a param of two or more dims."""

    recorded: str = ""
    """File with a routing that `layerwise inspect` recorded, which this run goes by. Empty: the defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How every learning rate moves over the run; all rules share one shape."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    """cosine: half a wave down. wsd: flat, then a straight line down at the end. constant: flat."""

    warmup_steps: int = 20
    """Steps of linear warm-up."""

    min_lr_ratio: float = 0.1
    """The last step's share of the learning rate (cosine and wsd)."""

    decay_fraction: float = 0.2
    """Share of the run that wsd spends going down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Which ranks do what, and how parameters and gradients are stored and travel."""

    layout: Layout = "flat"
    """flat: equal byte shards. padded, compact: whole matrices. replicated: everything everywhere."""

    pp: int = 1
    """Pipeline ranks: the blocks are cut into this many stages (times chunks). Microbatches are train.accumulation."""

    ep: int = 1
    """Ranks that share out the experts of a block. What is left, world / (pp * ep), is data parallel; ranks of fsdp and tp
    share out experts among themselves."""

    fsdp: int = 1
    """Ranks over which torch's fully_shard() cuts every param, in place of a layout of ours."""

    replicate: int = 1
    """Groups of fsdp ranks that hold the same shards (HSDP)."""

    tp: int = 1
    """Ranks that share out heads and MLP columns (tensor parallelism) and read the same samples."""

    reshard_after_forward: bool = True
    """With fsdp: let go of whole params between forward and backward (ZeRO-3); false keeps them (ZeRO-2)."""

    ddp: bool = False
    """Let torch's DistributedDataParallel average gradients; the optimizer shards its state and shares the work as layout
    says."""

    chunks: int = 1
    """Stages on each pipeline rank. 2 or more: an interleaved pipeline, with fewer idle moments and more messages."""

    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """gpipe: all forwards of a step, then all backwards. 1f1b: each backward as early as it can, with less memory."""

    reducer: Literal["collective", "ordered"] = "collective"
    """collective: the backend sums. ordered: fp32, in rank order, alike in every layout."""

    shard_grads: bool = False
    """Keep only this rank's shard of reduced gradients (ZeRO-2)."""

    bucket_mib: float | None = None
    """Size of a communication bucket. none: the library's choice."""

    overlap_grad_reduce: bool = True
    """Reduce gradients while backward is still running."""

    overlap_param_gather: bool | Literal["by chunk"] = True
    """Let new weights travel while the next forward is already running. by chunk: a chunk's, once its forward begins."""

    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are accumulated and reduced."""


def stop_signals_of(train: LoopConfig) -> tuple[str, ...]:
    """The names in `train.stop_signals`."""
    return tuple(filter(None, (name.strip() for name in train.stop_signals.split(","))))


def is_sharded(parallel: ParallelConfig) -> bool:
    """Whether torch cuts the model, with fully_shard() and parallelize_module(), and not `layerwise.DataParallel`."""
    return parallel.fsdp * parallel.replicate * parallel.tp != 1


ParamGatherRecipe = Literal["none", "mxfp8", "blockwise"]
BLOCK_MULTIPLES: dict[ParamGatherRecipe, int] = {"none": 1, "mxfp8": 32, "blockwise": 128}
"""What rows and columns of a weight must be multiples of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """In how many bits the weights of linear layers and experts are kept."""

    param_gather: ParamGatherRecipe = "none"
    """mxfp8: as codes of eight bits, in blocks of 32 along rows and along columns. blockwise: in tiles of 128 x 128. bf16
    travels, and every rank makes codes of it. none: in the dtype of train.precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """The training loop."""

    steps: int = 500
    """Optimizer steps."""

    batch_size: int = 8
    """Sequences per rank and microbatch."""

    accumulation: int = 1
    """Microbatches per step; a pipeline is filled with them."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the params. With bf16 the optimizer keeps fp32 masters."""

    seed: int = 0
    """Seed of the initial weights, the same on every rank."""

    eval_every: int = 100
    """Steps between validations; there is always one before the first step and one after the last. 0: only those."""

    eval_sequences: int = 64
    """Validation windows, evenly spaced over the validation text, the same for every world size."""

    log_every: int = 10
    """Steps between progress lines."""

    out_dir: str = "runs/train"
    """Folder for metrics, resolved config and report. One that holds a run is left alone: -2, -3 ... is appended."""

    stop_signals: str = "SIGINT,SIGTERM,SIGUSR1,SIGHUP"
    """Signals after which the run finishes its step, saves and ends, with commas between them. Under nohup not SIGHUP."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU when there is one."""

    deterministic: bool = False
    """Ask torch for deterministic kernels, and fail where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints, in a folder `checkpoints` of the run's own. The same command again goes on from the last one."""

    every: int = 0
    """Steps between checkpoints. There is also one when the run ends, or is asked to stop. 0: none."""

    keep: int | None = 3
    """How many of them stay. none: all."""

    background: bool = False
    """Train on while a checkpoint is written; takes as much memory of the host as this rank writes."""

    resume: bool = True
    """Go on from the last checkpoint of a run in out_dir, or in out_dir-2 and so on; a run that was killed before its first
    one begins anew in its folder. false: begin a new run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything about one training run, as the user wrote it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "routing": RoutingConfig,
    "schedule": ScheduleConfig,
    "parallel": ParallelConfig,
    "precision": PrecisionConfig,
    "train": LoopConfig,
    "checkpoint": CheckpointConfig,
}
"""The sections of a config file, in the order in which they are printed."""
