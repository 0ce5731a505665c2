"""One compiled callable per configuration: the main kernel and those before it."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ..arguments import Given
from ..device.fakes import vector
from ..device.operands import DTYPES
from ..device.places import fake_places, matrix_at, statistics_at, unused_rows, vector_at, words_of
from ..places import Sizes
from ..softcap import Cap
from .arguments import MATRICES, PARTS, Intervals, Launch, Tensors, Workspace, named, tensors_of
from .config import BackwardConfig
from .kernel import Backward
from .preprocess import Preprocess
from .seen import MarkSeen, PutUnseen


class Program:
    """The launches of one backward pass, in stream order. What may be left after them: ../convert."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.preprocess, self.backward = Preprocess(config), Backward(config)
        self.mark_seen, self.put_unseen = MarkSeen(config), PutUnseen(config)

    @cute.jit
    def __call__(self, *arguments):
        """Called with what ``arguments.named`` names; traced with a stream behind.

        The call is flat: what calls the compiled function builds no containers.
        """
        c, stream = self.config, arguments[-1]
        given = named(c, arguments[:-1])
        tensors, workspace = self._tensors(given), self._workspace(given)
        self.preprocess(tensors, workspace, given.launch, stream)
        if const_expr(c.intervals):
            self.mark_seen(tensors.k.shape[0], workspace, stream)
            if const_expr(c.waits):
                self.put_unseen(tensors, workspace, given.launch, stream)
        self.backward(tensors, workspace, given.launch, given.cap, stream)

    def _tensors(self, given: Given) -> Tensors:
        c, dtype, sizes = self.config, DTYPES[self.config.dtype], given.sizes
        alike = {"dq": "q", "dk": "k", "dv": "v", "dout": "out"}
        found = {"lse": statistics_at(given.lse, sizes.of_q)}
        for name, place in given.places.items():
            kind = alike.get(name, name)
            constant = None if c.padded else c.head_dim if kind in ("q", "k") else c.head_dim_v
            found[name] = matrix_at(dtype, place, getattr(sizes, f"of_{kind}"), constant)
        return Tensors(**found)

    def _workspace(self, given: Given) -> Workspace:
        table = given.tensors["table"]
        lse2, delta, dq_acc, group_sums, control = (vector_at(*part) for part in given.parts)
        found = {
            "errors": words_of(table, Int32, 16), "dq_contributions": unused_rows(table, Float32),
            "trace": unused_rows(table, Int64), "group_sums": group_sums,
        }  # fmt: skip
        others = {name: x for name, x in given.tensors.items() if name not in ("table", "work")}
        if const_expr(self.config.intervals):
            found["intervals"] = Intervals(*(others.pop(name) for name in Intervals._fields))
        return Workspace(
            table=table, lse2=lse2, delta=delta, dq_acc=dq_acc, control=words_of(control, Int32, 128),
            **(found | others),
        )  # fmt: skip


def fake_arguments(config: BackwardConfig, env_stream: bool):
    """What stands for the arguments of `Program.__call__` while it is compiled."""

    def rows(element):
        return make_fake_tensor(
            element, (cute.sym_int32(), cute.sym_int32()), (cute.sym_int64(), 1), assumed_align=16
        )

    kinds = {
        "table": vector(Int32, 16), "work": vector(Float32, 128), "group_sums": vector(Float32, 128),
        "errors": vector(Int32, 16), "dq_contributions": rows(Float32), "trace": rows(Int64),
        "starts": vector(Int32, 4), "ends": vector(Int32, 4), "items": vector(Int32, 16),
        "seen": rows(Int32),
    }  # fmt: skip
    launch = Launch(Float32(1.0), *(Int32(1) for _ in Launch._fields[1:]))
    cap = Cap(Float32(1.0), Float32(1.0)) if config.softcap else ()
    return [
        *(kinds[name] for name in tensors_of(config)), *fake_places(len(MATRICES)), Int64(0),
        *(Int32(1) for _ in Sizes._fields), *(Int64(32) for _ in 2 * PARTS), *launch, *cap,
        make_fake_stream(use_tvm_ffi_env_stream=env_stream),
    ]  # fmt: skip
