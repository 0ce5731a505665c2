"""The main kernel of the forward over a cache of keys.

It is the forward of training (forward/kernel.py) but for three things. A q tile has the rows of all q heads
of a kv head, token by token, so that K and V are read once for them. Items come from a table that ``Deal``
wrote, on the device. And K and V come in pages. What a row computes is the same, operation by operation.
"""

import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..device.operands import DTYPES
from ..forward.arguments import Layouts, Products
from ..forward.block import LOAD_WARP, begin, launch_blocks, layouts_of, products_of
from .arguments import Copies, Memory
from .config import CachedConfig
from .few import FewMma
from .item import Q_WARPS
from .load import CachedLoad
from .mma import CachedMma
from .pages import copies_of_pages

FIRST_Q_WARP, FIRST_MMA_WARP = 1, 4


@cute.jit
def rows_of_groups(tensor, group: Int32):
    """(B, S, H, D) as (B, (group, S), H / group, D): rows are those of all q heads of a kv head."""
    batch, tokens, heads, columns = tensor.shape
    of_batch, of_token, of_head, of_column = tensor.stride
    shape = (batch, (group, tokens), heads // group, columns)
    stride = (of_batch, (of_head, of_token), of_head * group, of_column)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


@cute.jit
def statistics_of_groups(lse, group: Int32):
    """(B, H, S) as (B, H / group, (group, S))."""
    batch, heads, tokens = lse.shape
    of_batch, of_head, of_token = lse.stride
    shape = (batch, heads // group, (group, tokens))
    stride = (of_batch, of_head * group, (of_head, of_token))
    return cute.make_tensor(lse.iterator, cute.make_layout(shape, stride=stride))


class Cached:
    def __init__(self, config: CachedConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.load_role = CachedLoad(config, self.dtype)
        self.mma_role = (FewMma if config.warpgroups == 1 else CachedMma)(config, self.dtype)

    def _barrier_counts(self):
        c = self.config
        warps = 4 * c.warpgroups
        return {
            "q_full": (c.q_stages, Q_WARPS), "q_empty": (c.q_stages, warps),
            "k_full": (c.kv_stages, 1), "k_empty": (c.kv_stages, warps),
            "v_full": (c.kv_stages, 1), "v_empty": (c.kv_stages, warps),
        }  # fmt: skip

    @cute.jit
    def __call__(self, tensors, memory: Memory, launch, cap, stream):
        """cap: the numbers of a softcap, where the variant has one."""
        c = self.config
        layouts = layouts_of(c, self.dtype)
        copies = Copies(*copies_of_pages(c, self.dtype, tensors))
        kv_heads = tensors.k.shape[2]
        scales = cap if c.softcap else (launch.scale,)
        numbers = (
            *scales, launch.left, launch.right, tensors.q.shape[2] // kv_heads, kv_heads,
            tensors.k.shape[0], tensors.k.shape[1], launch.most_pages,
            *(Int32(x.stride[0] // x.stride[1]) for x in (tensors.k, tensors.v)),
            *((launch.share,) if c.warpgroups == 1 else ()),
        )  # fmt: skip
        launch_blocks(
            self.kernel(copies, layouts, products_of(c, self.dtype), memory, numbers), c, launch.grid, stream
        )

    @cute.kernel
    def kernel(self, copies: Copies, layouts: Layouts, products: Products, memory: Memory, numbers) -> None:
        c = self.config
        of_scores = 2 if c.softcap else 1
        warp_idx, rings, shared = begin(c, self.dtype, copies, layouts, self._barrier_counts())
        if warp_idx < FIRST_MMA_WARP:
            if const_expr(c.warpgroups > 1):
                cute.arch.setmaxregister_decrease(c.registers[1])
            if warp_idx == LOAD_WARP:
                self.load_role.run(copies, memory, shared, rings, numbers[of_scores:])
            else:
                self.load_role.copy_queries(memory, shared, rings, warp_idx - FIRST_Q_WARP)
        else:
            if const_expr(c.warpgroups > 1):
                cute.arch.setmaxregister_increase(c.registers[0])
            self.mma_role.run(products, memory, shared, rings, numbers[:of_scores])
