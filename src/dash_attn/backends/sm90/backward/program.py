"""One compiled callable per configuration: the kernel before, the main one and, where needed, one after."""

from functools import partial

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ..arguments import regrouped
from ..device import fakes
from ..device.fakes import statistics, vector
from ..device.operands import DTYPES
from ..softcap import Cap
from .arguments import Launch, Tensors, Workspace
from .config import BackwardConfig
from .kernel import Backward
from .preprocess import Convert, Preprocess


class Program:
    """The launches of one backward pass, in stream order."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.preprocess, self.backward, self.convert = Preprocess(config), Backward(config), Convert(config)

    @cute.jit
    def __call__(self, *arguments):
        """Called with ``(*Tensors, *Workspace, *Launch)``, and with a softcap ``*Cap``, see arguments.py
        and ..softcap; traced with a stream behind.

        The call is flat: what calls the compiled function builds no containers.
        """
        stream = arguments[-1]
        tensors, workspace, launch = regrouped(arguments[:-1], Tensors, Workspace, Launch)
        cap = arguments[len(tensors + workspace + launch) : -1]
        self.preprocess(tensors, workspace, launch, stream)
        self.backward(tensors, workspace, launch, cap, stream)
        converted = 0 if const_expr(self.config.ordered) else launch.q_tiles
        if converted + launch.kv_tiles > 0:
            self.convert(tensors, workspace, launch, converted, stream)


def fake_arguments(config: BackwardConfig, env_stream: bool):
    """Tensors without data, in the order of `Program.__call__`."""
    matrix, of_v = (
        partial(fakes.matrix, DTYPES[config.dtype], None if config.padded else columns)
        for columns in (config.head_dim, config.head_dim_v)
    )

    def rows(element):
        return make_fake_tensor(
            element, (cute.sym_int32(), cute.sym_int32()), (cute.sym_int64(), 1), assumed_align=16
        )

    tensors = Tensors(
        q=matrix(), k=matrix(), v=of_v(), out=of_v(), dout=of_v(), lse=statistics(),
        dq=matrix(), dk=matrix(), dv=of_v(),
    )  # fmt: skip
    workspace = Workspace(
        table=vector(Int32, 16),
        lse2=vector(Float32, 128),
        delta=vector(Float32, 128),
        dq_acc=vector(Float32, 128),
        group_sums=vector(Float32, 128),
        control=vector(Int32, 128),
        errors=vector(Int32, 16),
        dq_contributions=rows(Float32),
        trace=rows(Int64),
    )
    launch = Launch(
        scale=Float32(1.0),
        q_tiles=Int32(1),
        kv_tiles=Int32(0),
        grid=Int32(1),
        workers=Int32(1),
        complete=Int32(1),
    )
    cap = Cap(Float32(1.0), Float32(1.0)) if config.softcap else ()
    return [*tensors, *workspace, *launch, *cap, make_fake_stream(use_tvm_ffi_env_stream=env_stream)]
