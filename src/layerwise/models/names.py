"""Names as the user wrote them: what torch puts around a module to compile it or to recompute its activations is no part of
them. A compiled run and an eager one have the same plan, rules and state then."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

_WRAPPERS = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"): "_checkpoint_wrapped_module",
}
"""Classes of torch that stand around a module and behave like it, by where they are defined (importing them would take
seconds), with the name under which they hold it."""


def inner_name(module: nn.Module) -> str:
    """The name under which a wrapper holds the module that it stands for; empty for any other module."""
    found = (_WRAPPERS.get((base.__module__, base.__name__)) for base in type(module).__mro__)
    return next((name for name in found if name is not None), "")


def unwrapped(module: nn.Module) -> nn.Module:
    """The module itself, past what stands around it."""
    while name := inner_name(module):
        module = module.get_submodule(name)
    return module


def named_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a module, past what stands around them or around it."""
    for name, child in unwrapped(module).named_children():
        yield name, unwrapped(child)


def named_modules(root: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Every module by its plain name, without the wrappers."""
    inside: dict[str, str] = {}
    """Plain names of what is within a module, up to their last part, by that module's full name."""
    wrappers: dict[str, str] = {}
    for full, module in root.named_modules(remove_duplicate=remove_duplicate):
        holder, _, part = full.rpartition(".")
        if not full:
            plain = ""
        elif wrappers.get(holder) == part:
            plain = inside[holder]
        else:
            plain = joined(inside[holder], part)
        inside[full] = plain
        if inner := inner_name(module):
            wrappers[full] = inner
        else:
            yield plain, module


def named_parameters(root: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Every param by its plain name, in torch's order."""
    seen: set[int] = set()
    for prefix, module in named_modules(root, remove_duplicate=remove_duplicate):
        for name, param in module._parameters.items():
            if param is not None and not (remove_duplicate and id(param) in seen):
                seen.add(id(param))
                yield joined(prefix, name), param


def named_buffers(root: nn.Module, *, persistent: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every buffer by its plain name, in torch's order; or those that are part of the module's state."""
    seen: set[int] = set()
    for prefix, module in named_modules(root):
        for name, buffer in module._buffers.items():
            if persistent and name in module._non_persistent_buffers_set:
                continue
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield joined(prefix, name), buffer


def joined(prefix: str, name: str) -> str:
    """A name within what the prefix names; an empty prefix names the root."""
    return f"{prefix}.{name}" if prefix else name
