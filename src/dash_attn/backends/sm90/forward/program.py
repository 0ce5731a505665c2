"""One compiled callable per configuration."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ..backward.kernel import DTYPES
from .arguments import Launch, Tensors, Workspace, regrouped
from .claims import Claims
from .config import ForwardConfig
from .fold import Fold
from .kernel import Forward


class Program:
    def __init__(self, config: ForwardConfig):
        self.config = config
        self.claims, self.forward, self.fold = Claims(), Forward(config), Fold(config)

    @cute.jit
    def __call__(self, *arguments):
        stream = arguments[-1]
        tensors, workspace, launch = regrouped(arguments[:-1])
        if launch.grid < launch.entries * tensors.q.shape[2]:
            self.claims(workspace.claimed, stream)
        self.forward(tensors, workspace, launch, stream)
        if launch.folds > 0:
            self.fold(tensors, workspace, launch, stream)


def fake_arguments(config: ForwardConfig, env_stream: bool):
    dtype = DTYPES[config.dtype]

    def matrix():
        shape = (*(cute.sym_int32() for _ in range(3)), config.head_dim)
        stride = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
        return make_fake_tensor(dtype, shape, stride, assumed_align=16)

    def vector(element, align):
        return make_fake_tensor(element, (cute.sym_int64(),), (1,), assumed_align=align)

    lse = make_fake_tensor(
        Float32,
        tuple(cute.sym_int32() for _ in range(3)),
        (cute.sym_int64(), cute.sym_int64(), 1),
        assumed_align=4,
    )
    tensors = Tensors(q=matrix(), k=matrix(), v=matrix(), out=matrix(), lse=lse)
    workspace = Workspace(
        table=vector(Int32, 16),
        claimed=vector(Int32, 4),
        state=vector(Float32, 128),
        partial=vector(Float32, 128),
    )
    launch = Launch(
        scale=Float32(1.0),
        entries=Int32(1),
        folds=Int32(0),
        heads=Int32(1),
        grid=Int32(1),
        left=Int32(-1),
        right=Int32(-1),
    )
    return [*tensors, *workspace, *launch, make_fake_stream(use_tvm_ffi_env_stream=env_stream)]
