"""Hugging Face Trainer: the mixin, and the rules as one more argument.

torchrun --nproc-per-node 2 examples/frameworks/huggingface.py
torchrun --nproc-per-node 2 examples/frameworks/huggingface.py --fsdp     # FSDP2, which accelerate has on GPUs only
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from task import Sequences, arguments, build, rules
from transformers import Trainer, TrainingArguments

from layerwise.integrations.transformers import TrainerMixin


class LayerwiseTrainer(TrainerMixin, Trainer):
    """The trainer, with our optimizer."""


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The loss of every step, over all ranks."""
    args = arguments(argv, __doc__)
    trainer = LayerwiseTrainer(
        model=build(),
        args=TrainingArguments(
            output_dir=args.out,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            gradient_accumulation_steps=args.accumulation,
            max_grad_norm=args.grad_clip,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            save_steps=args.steps,
            logging_steps=1,
            logging_nan_inf_filter=False,
            ddp_backend=None if torch.cuda.is_available() else "gloo",
            use_cpu=not torch.cuda.is_available(),
            fsdp=args.fsdp,
            fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["Block"]} if args.fsdp else None,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Sequences(),
        layerwise=rules(),
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(main())
