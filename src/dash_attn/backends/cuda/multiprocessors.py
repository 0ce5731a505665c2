"""How many SMs the blocks of a launch can be on: the device's, or the share that its context has.

A green context (CUDA 12.4 and newer), or an affinity given to the context, keeps the work of its streams on
some of the SMs for good. Other work on the same SMs takes none of them for good, because it ends.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ...errors import UnavailableError

__all__ = ["multiprocessors", "usable_multiprocessors"]

_FIRST_DRIVER = 12_040
"""The CUDA version of the first driver with green contexts; before it, every stream has the whole device."""


@cache
def multiprocessors(device: torch.device) -> int:
    """All SMs of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def usable_multiprocessors(device: torch.device) -> int:
    """SMs that work on the current stream of a device can use.

    Raises:
        UnavailableError: the driver does not say.
    """
    driver = _driver()
    if driver is None:
        return multiprocessors(device)
    index = torch.cuda.current_device()
    if device.index not in (None, index):
        with torch.cuda.device(device):
            return usable_multiprocessors(device)
    found = multiprocessors(device)
    context, stream = int(_value(driver.cuCtxGetCurrent())), torch._C._cuda_getCurrentRawStream(index)
    if context == _own_context(index):
        found = _of_current_context(("own", index))
    elif context:
        found = _of_current_context(("other", _value(driver.cuCtxGetId(context))))
    # A stream stays in the green context that made it, whichever context is current. The default stream is
    # one of the current context, and a new thread's is one of the device's own.
    if stream and int(green := _value(driver.cuStreamGetGreenCtx(stream))):
        found = min(found, _sms(driver.cuGreenCtxGetDevResource(green, _sm_resource())))
    return found


@cache
def _driver() -> Any:
    """The driver's functions; None if it is from before there were green contexts."""
    from cuda.bindings import driver

    return driver if _value(driver.cuDriverGetVersion()) >= _FIRST_DRIVER else None


@cache
def _own_context(index: int) -> int:
    """The context of a device that PyTorch works in. It lives as long as the process."""
    driver = _driver()
    return int(_value(driver.cuDevicePrimaryCtxRetain(_value(driver.cuDeviceGet(index)))))


@cache
def _of_current_context(which: tuple[str, int]) -> int:
    """SMs of the current context, by what no other one has: that it is a device's own, or its number, which a
    process never gives to another one."""
    driver = _driver()
    return _sms(driver.cuCtxGetDevResource(_value(driver.cuCtxGetCurrent()), _sm_resource()))


def _sm_resource() -> Any:
    return _driver().CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM


def _sms(answer: tuple[Any, Any]) -> int:
    return int(_value(answer).sm.smCount)


def _value(result: tuple[Any, Any]) -> Any:
    status, value = result
    if int(status):
        raise UnavailableError(f"the driver does not say which SMs the current stream can use: {status!r}")
    return value
