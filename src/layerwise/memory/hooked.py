"""Params whose gradients live in buckets: their `.grad` stays None, and those who ask for it in vain are answered.

Some of torch's own functions walk over `param.grad`. `clip_grad_norm_()` and its like would clip nothing and return 0, and an
optimizer of torch's would step nothing, so they get a warning; a pipeline's schedule would leave gradients undivided, so it
gets an error; `Module.zero_grad()` would forget nothing, so it is taken for what it says. Only reads of `.grad` from Python pass here: autograd does not, nor does
anything that reads values.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from types import FrameType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from layerwise.errors import warn
from layerwise.models.tracing import never_traced


class GradKeeper(Protocol):
    """Who takes the gradients of params away."""

    @property
    def has_gradients(self) -> bool: ...

    def forget_one(self, fqn: str) -> None:
        """This param's gradient is not wanted any more."""


@dataclass(frozen=True)
class _Claim:
    fqn: str
    keeper: weakref.ref[GradKeeper]


_CLAIMS: MutableMapping[object, _Claim] = WeakIdKeyDictionary()
"""The claim on every hooked param. One whose keeper is gone is none."""
_TAKEN: MutableMapping[object, weakref.ref[object]] = WeakIdKeyDictionary()
"""Whose every param is that lies in somebody's buffers, hooked or not."""
_WARNED: weakref.WeakSet[GradKeeper] = weakref.WeakSet()
"""Models whose gradients torch's clipping asked for in vain: said once for each."""
_READ: weakref.WeakSet[GradKeeper] = weakref.WeakSet()
"""Models whose gradients other code asked for in vain: said once for each."""
_STEPPED: weakref.WeakSet[GradKeeper] = weakref.WeakSet()
"""Models whose params another optimizer was to step: said once for each."""

_GRAD: Any = getattr(Tensor, "grad")  # noqa: B009  (torch declares the class's own descriptor as a value)
_ZERO_GRAD = nn.Module.zero_grad.__code__
_CLIP_FILE = clip_grad.__file__
_SCALES = ("torch.distributed.pipelining.stage", "scale_grads")
"""The module and the function by which a pipeline's schedule divides gradients; by name, since importing it takes long."""
_BETWEEN = (__name__, "torch._dynamo")
_QUIET = ("torch", "layerwise")
"""Packages that know what they find: torch's own functions that would do nothing have answers of their own."""


def _kept(param: object) -> tuple[str, GradKeeper | None]:
    """The name of a param, and who has its gradients, if anybody does."""
    claim = _CLAIMS.get(param)
    return ("", None) if claim is None else (claim.fqn, claim.keeper())


class HookedParam:
    """Mixed into the class of a param whose gradients are taken to buckets."""

    plain: type[nn.Parameter]
    """The class that the param had before."""
    answer: Callable[[str, GradKeeper], None]
    """`_answer`, for code that is compiled too."""

    @property
    def grad(self) -> Tensor | None:
        fqn, keeper = _kept(self)
        if keeper is not None and keeper.has_gradients:
            type(self).answer(fqn, keeper)
        found: Tensor | None = _GRAD.__get__(self)
        return found

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        fqn, keeper = _kept(self)
        if grad is None and keeper is not None and keeper.has_gradients:
            keeper.forget_one(fqn)  # `param.grad = None` is how some loops say zero_grad()
        _GRAD.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    def __repr__(self) -> str:
        self.detach()  # type: ignore[attr-defined]  # brings a stale one up to date, which changes its class
        hooked = type(self)
        self.__class__ = self.plain  # type: ignore[assignment]
        try:
            return repr(self)
        finally:
            self.__class__ = hooked

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)  # type: ignore[misc]
        copied.__class__ = self.plain  # nobody takes the copy's gradients
        return copied


def _asking() -> FrameType | None:
    """Who reads a hooked param's `.grad`: the frame past our own and past the compiler's, which may stand in between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def _answer(fqn: str, keeper: GradKeeper) -> None:
    """Do what whoever reads a hooked param's `.grad` wants of it, as far as it is known."""
    asking = _asking()
    if asking is None:
        return
    # By name: compiled, the same function has other code.
    if asking.f_code.co_filename == _ZERO_GRAD.co_filename and _ZERO_GRAD.co_name in asking.f_code.co_name:
        keeper.forget_one(fqn)
    elif asking.f_code.co_filename == _CLIP_FILE and keeper not in _WARNED:
        _WARNED.add(keeper)
        warn(
            "torch's functions that clip gradients find none in a layerwise.DataParallel, and change nothing: gradients are in "
            "buckets. Call model.clip_grad_norm_(max_norm), or pass clip_grad_norm= to the Optimizer; the norm is in "
            "optimizer.stats.grad_norm.",
        )
    elif isinstance(foreign := asking.f_locals.get("self"), Optimizer) and keeper not in _STEPPED:
        _STEPPED.add(keeper)
        kind = type(foreign)
        warn(
            f"{kind.__module__}.{kind.__name__} holds {fqn!r}, a param of a layerwise.DataParallel, and leaves it as it is: gradients are "
            "in buckets, and its .grad is None. Step the model with layerwise.Optimizer(model, matrix=..., other=...); what the "
            "wrapper does not train can have another optimizer.",
        )
    elif (asking.f_globals.get("__name__"), asking.f_code.co_name) == _SCALES:
        raise ValueError(
            "a pipeline schedule with scale_grads=True, which is torch's default, divides param.grad by the number of "
            f"microbatches, and that of {fqn!r} lies in a bucket of layerwise.DataParallel: gradients would stay as many times too "
            "large. Pass scale_grads=False to the schedule, and divide the loss by the number of microbatches."
        )
    elif keeper not in _READ and asking.f_globals.get("__name__", "").partition(".")[0] not in _QUIET:
        _READ.add(keeper)
        warn(
            f"the .grad of param {fqn!r} was read between backward and step(), and is None: under layerwise.DataParallel gradients are "
            "in buckets, so sharpness-aware steps, gradient surgery and loggers find none. The norm is in optimizer.stats.grad_norm; "
            "gradients that can be read and written are those of a DistributedDataParallel with layerwise.Optimizer(ddp, ...).",
        )


@cache
def _hooked_kind(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    return type(
        f"Hooked{kind.__name__}", (HookedParam, kind), {"plain": kind, "answer": staticmethod(never_traced(_answer))}
    )


def hook(fqn: str, param: nn.Parameter, keeper: GradKeeper) -> None:
    """From now on a param's gradients are its keeper's, for as long as that lives."""
    claim(param, keeper)
    _CLAIMS[param] = _Claim(fqn, weakref.ref(keeper))
    if not isinstance(param, HookedParam):
        param.__class__ = _hooked_kind(type(param))


def unhook(params: Iterable[nn.Parameter]) -> None:
    """Params are as they were."""
    for param in params:
        _CLAIMS.pop(param, None)
        _TAKEN.pop(param, None)
        if isinstance(param, HookedParam):
            param.__class__ = param.plain  # type: ignore[assignment]


def claim(param: nn.Parameter, whose: object) -> None:
    """From now on a param lies in somebody's buffers, for as long as that lives."""
    _TAKEN[param] = weakref.ref(whose)


def is_claimed(param: nn.Parameter) -> bool:
    """Whether a param lies in somebody's buffers."""
    found = _TAKEN.get(param)
    return found is not None and found() is not None


def grad_of(param: Tensor) -> Tensor | None:
    """A param's `.grad`, read by ourselves."""
    found: Tensor | None = _GRAD.__get__(param)
    return found


def grads_of(params: Iterable[Tensor]) -> Iterable[Tensor | None]:
    """The `.grad`s of many params, read by ourselves and without a call of Python for each."""
    return map(_GRAD.__get__, params)


def take_grad(param: Tensor) -> Tensor | None:
    """A param's `.grad`, taken away by ourselves."""
    found = grad_of(param)
    drop_grad(param)
    return found


def drop_grad(param: Tensor) -> None:
    """Have a param have no `.grad`."""
    _GRAD.__set__(param, None)


def drop_grads(params: Iterable[Tensor]) -> None:
    """The same of many, without a call of Python for each."""
    deque(map(_GRAD.__set__, params, repeat(None)), maxlen=0)
