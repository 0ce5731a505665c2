"""One compiled callable a configuration: preprocessing, main kernel and, where there is any, the rest behind one host call."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .config import BackwardConfig
from .kernel import DTYPES, Backward
from .preprocess import Convert, Preprocess


class Program:
    """The launches of one backward pass, in stream order."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.preprocess, self.backward, self.convert = Preprocess(config), Backward(config), Convert(config)

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, do: cute.Tensor, lse: cute.Tensor,
        dq: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor, plan: cute.Tensor, lse2: cute.Tensor, delta: cute.Tensor,
        dq_acc: cute.Tensor, parts: cute.Tensor, control: cute.Tensor, errors: cute.Tensor, partials: cute.Tensor,
        trace: cute.Tensor, scale: Float32, q_tiles: Int32, kv_tiles: Int32, grid: Int32, workers: Int32,
        complete: Int32, stream,
    ):  # fmt: skip
        """`q_tiles`: of one head over all sequences; `kv_tiles` likewise, 0 where every kv head is one head group. The first
        `workers` of `grid` blocks to arrive execute the plan, all convert dQ if there is an order; `complete`: dQ tiles of all heads with contributions.
        """
        self.preprocess(o, do, lse, lse2, delta, dq_acc, dq, plan, control, q_tiles, complete, stream)
        self.backward(
            q,
            k,
            v,
            do,
            lse2,
            delta,
            dq_acc,
            dq,
            dk,
            dv,
            parts,
            plan,
            control,
            errors,
            partials,
            trace,
            scale,
            grid,
            workers,
            complete,
            stream,
        )
        converted = 0 if const_expr(self.config.ordered) else q_tiles
        if converted + kv_tiles > 0:
            self.convert(dq_acc, parts, dq, dk, dv, plan, scale, converted, kv_tiles, stream)


def fake_arguments(config: BackwardConfig, env_stream: bool):
    """Tensors without data, in the order of `Program.__call__`; strides 64 bit, rows of 16-byte multiples."""
    dtype = DTYPES[config.dtype]

    def matrix():
        shape = (*(cute.sym_int32() for _ in range(3)), config.head_dim)
        stride = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
        return make_fake_tensor(dtype, shape, stride, assumed_align=16)

    def vector(element, align):
        return make_fake_tensor(element, (cute.sym_int64(),), (1,), assumed_align=align)

    def table(element):
        return make_fake_tensor(
            element, (cute.sym_int32(), cute.sym_int32()), (cute.sym_int64(), 1), assumed_align=16
        )

    lse = make_fake_tensor(
        Float32,
        tuple(cute.sym_int32() for _ in range(3)),
        (cute.sym_int64(), cute.sym_int64(), 1),
        assumed_align=4,
    )
    matrices = [matrix() for _ in range(5)]
    return [
        *matrices, lse, matrix(), matrix(), matrix(), vector(Int32, 16), vector(Float32, 128), vector(Float32, 128),
        vector(Float32, 128), vector(Float32, 128), vector(Int32, 128), vector(Int32, 16), table(Float32), table(Int64),
        Float32(1.0), Int32(1), Int32(0), *[Int32(1)] * 3, make_fake_stream(use_tvm_ffi_env_stream=env_stream),
    ]  # fmt: skip
